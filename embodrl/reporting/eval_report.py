"""The page of an evaluation: one HTML file with figures, a table, bars with their intervals, and the grid of videos."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from embodrl.reporting.report import BLUE, STYLE

# A larger grid is linked, not embedded: browsers are slow with long addresses.
EMBED_BYTES = 16 * 2**20
ROW_PX, LABEL_PX, BAR_PX, TEXT_PX = 26, 300, 420, 230
OWN_STYLE = """
table.tasks td { font-family: inherit; font-variant-numeric: tabular-nums; }
table.tasks th { text-align: left; font-weight: 600; padding: .2rem 1.5rem .2rem 0; }
svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
video.grid { width: auto; max-width: 100%; }
"""


def eval_page(content: Mapping[str, Any], title: str, directory: Path, grid: Path | None, videos: list[Path]) -> str:
    """Return the page.

    Args:
        content: as eval.json has it.
        title: of the page.
        directory: where the page will lie; videos are named from there.
        grid: the video of all filmed episodes.
        videos: one a filmed episode.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", _figures(content)]
    rows = [(name, row) for name, row in content["tasks"].items()]
    if rows:
        parts += ["<h2>Success by task</h2>", bars(rows), _table(rows)]
    if grid is not None:
        parts += ["<h2>Episodes</h2>", _grid(grid, directory), _links(videos, directory)]
    facts = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_text(value))}</td></tr>"
        for name, value in content["settings"].items()
    )
    parts += ["<h2>What was measured</h2>", f"<table>{facts}</table>"]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}{OWN_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _figures(content: Mapping[str, Any]) -> str:
    low, high = content["interval"]
    figures = [("episodes", f"{content['episodes']:,}"), ("lost to faults", f"{content['lost_episodes']:,}")]
    if content["episodes"]:
        rate = f"{100 * content['success_rate']:.1f} %"
        figures = [
            ("success rate", rate),
            ("95 % interval", f"{100 * low:.1f} to {100 * high:.1f} %"),
            *figures,
            ("mean return", f"{content['mean_return']:.3g}"),
            ("mean length, steps", f"{content['mean_length']:.1f}"),
        ]
    cells = "".join(f"<div><b>{html.escape(value)}</b>{html.escape(label)}</div>" for label, value in figures)
    return f'<div class="figures">{cells}</div>'


def bars(rows: list[tuple[str, Mapping[str, Any]]]) -> str:
    """Return an inline SVG: a bar from 0 to 100 % for each task, and a whisker over its interval."""
    height = ROW_PX * len(rows) + 24
    parts: list[str] = []
    for tick in (0, 25, 50, 75, 100):
        x = LABEL_PX + BAR_PX * tick / 100
        parts.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height - 20}" stroke="#8884"/>')
        parts.append(f'<text x="{x}" y="{height - 5}" text-anchor="middle">{tick} %</text>')
    for number, (name, row) in enumerate(rows):
        middle = ROW_PX * number + ROW_PX / 2
        low, high = (LABEL_PX + BAR_PX * bound for bound in row["interval"])
        short = name if len(name) <= 40 else f"{name[:39]}…"
        whisker = f"M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10"
        parts += [
            f'<text x="{LABEL_PX - 10}" y="{middle + 4}" text-anchor="end"><title>{html.escape(name)}</title>'
            f"{html.escape(short)}</text>",
            f'<rect x="{LABEL_PX}" y="{middle - 8}" width="{BAR_PX * row["success_rate"]:.1f}" height="16" rx="2"'
            f' fill="{BLUE}"/>',
            f'<path d="{whisker}" stroke="currentColor" stroke-width="1.5" fill="none"/>',
            f'<text x="{LABEL_PX + BAR_PX + 14}" y="{middle + 4}">{_percent(row)}</text>',
        ]
    width = LABEL_PX + BAR_PX + TEXT_PX
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" style="max-width:100%"'
        f' aria-label="success by task">{"".join(parts)}</svg>'
    )


def _percent(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    return f"{100 * row['success_rate']:.1f} % ({100 * low:.0f} to {100 * high:.0f})"


def _table(rows: list[tuple[str, Mapping[str, Any]]]) -> str:
    head = "".join(
        f"<th>{name}</th>" for name in ("task", "instruction", "successes", "episodes", "success", "95 % interval")
    )
    lines: list[str] = []
    for name, row in rows:
        low, high = row["interval"]
        cells = (
            name,
            row["instruction"],
            row["successes"],
            row["episodes"],
            f"{100 * row['success_rate']:.1f} %",
            f"{100 * low:.1f} to {100 * high:.1f} %",
        )
        lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f'<table class="tasks"><tr>{head}</tr>{"".join(lines)}</table>'


def _grid(grid: Path, directory: Path) -> str:
    if grid.stat().st_size <= EMBED_BYTES:
        source = f"data:video/mp4;base64,{base64.b64encode(grid.read_bytes()).decode('ascii')}"
    else:
        source = _relative(grid, directory)
    return (
        "<p>The first episodes of the fixed seeds, whatever came of them: grey while they run, then green with a tick,"
        f' or red with a cross.</p><video class="grid" controls muted loop autoplay playsinline src="{source}"></video>'
    )


def _links(videos: list[Path], directory: Path) -> str:
    links = ", ".join(f'<a href="{_relative(path, directory)}">{html.escape(path.stem)}</a>' for path in videos)
    return f"<p>Each on its own: {links}</p>"


def _relative(path: Path, directory: Path) -> str:
    return quote(path.relative_to(directory).as_posix())


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
