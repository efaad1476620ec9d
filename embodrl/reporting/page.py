"""Common parts of the HTML pages: one self-contained file each, for light and dark screens, desktops and phones."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from embodrl.errors import without_controls
from embodrl.fields import read_regular_file

# Controls except tab and newline, surrogates of names that are not UTF-8, and bidirectional controls.
UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
EMBED_BYTES = 16 * 2**20
"""Videos beyond this total are linked, not embedded: browsers are slow with larger files."""

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2024; --soft: #667078; --line: #dde1e5; --card: #f7f8fa;
  --c0: #2a6fbb; --c1: #d9730d; --c2: #2f8f4e; --c3: #b3261e; --c4: #7b4bb3; --c5: #0f8b8d; --grey: #8a939b;
  --good: #2f8f4e; --bad: #b3261e; --warn: #9a6700; --warnbg: #fff8e5; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --fg: #e6e9ec; --soft: #9aa4ad; --line: #343a40;
  --card: #1c2024; --c0: #6aaef5; --c1: #f2a154; --c2: #63c285; --c3: #f07a72; --c4: #b899ea; --c5: #4fc7c9;
  --grey: #7d868e; --good: #63c285; --bad: #f07a72; --warn: #f0c75e; --warnbg: #2b2615; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--fg); background: var(--bg);
  max-width: 1120px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.45rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: .9rem; font-weight: 600; margin: 0 0 .3rem; } a { color: var(--c0); }
.sub { color: var(--soft); margin: .2rem 0 1.2rem; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(172px, 1fr)); gap: .7rem; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem;
  color: var(--soft); font-size: .82rem; line-height: 1.35; }
.figures b { display: block; font-size: 1.25rem; font-weight: 600; color: var(--fg); line-height: 1.3;
  white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: .9rem; }
.chart { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .7rem .4rem; }
.chart.wide { grid-column: 1 / -1; } .chart svg { display: block; width: 100%; height: auto; }
.chart svg.narrow { display: none; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .grid { stroke: var(--line); }
svg .series { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .whisker { stroke-width: 1.2; opacity: .65; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1rem; font-size: .8rem; color: var(--soft);
  margin-bottom: .2rem; }
.legend i { display: inline-block; width: 16px; border-top: 3px solid; margin-right: .35rem; vertical-align: middle; }
.legend i.dashed { border-top: 2px dashed; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .87rem; width: 100%; }
td, th { text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td { overflow-wrap: anywhere; min-width: 4.5em; }
.facts td:first-child { white-space: nowrap; color: var(--soft); }
td.number { font-variant-numeric: tabular-nums; }
code, pre, td.value { font-family: ui-monospace, "SF Mono", Menlo, monospace; font-size: .85em; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem; margin: .4rem 0;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.warnings { list-style: none; margin: 0; padding: 0; } .warnings li { background: var(--warnbg); margin: 0 0 .5rem;
  border-left: 4px solid var(--warn); border-radius: 4px; padding: .5rem .8rem; }
.videos { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(46%, 220px), 1fr)); gap: .8rem; }
figure { margin: 0; } figure video { display: block; width: 100%; border-radius: 8px; border: 4px solid var(--grey);
  cursor: pointer; }
figure.success video { border-color: var(--good); } figure.failure video { border-color: var(--bad); }
figcaption { font-size: .82rem; color: var(--soft); padding-top: .2rem; }
.success b { color: var(--good); } .failure b { color: var(--bad); }
details summary { cursor: pointer; color: var(--soft); margin: .8rem 0 .2rem; }
@media (max-width: 560px) { td, th { padding-right: .6rem; }
  .headed tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .headed tr:first-child { display: none; }
  .headed td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; }
  .headed td::before { content: attr(data-title); color: var(--soft); overflow-wrap: anywhere; }
  .headed td:first-child::before { content: none; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures b { font-size: 1.1rem; } .chart svg.wide { display: none; } .chart svg.narrow { display: block; } }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML page; ``title`` is text, ``parts`` are HTML. Characters in ``UNFIT`` are escaped."""
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )
    return UNFIT.sub(lambda match: without_controls(match.group()), text)


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the row of large numbers; ``pairs`` are (value, label)."""
    cells = "".join(f"<div><b>{html.escape(value)}</b>{html.escape(label)}</div>" for value, label in pairs)
    return f'<div class="figures">{cells}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], value_columns: Sequence[int] = ()) -> str:
    """Return a table; on a narrow page each row of a table with a head becomes a list of titles and cells.

    ``value_columns`` have a monospaced font.
    """
    names = [html.escape(name) for name in head]
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"] if head else []
    titles = [f' data-title="{name}"' for name in names]
    for row in rows:
        cells = (
            f"<td class={'value' if column in value_columns else 'number'}{title}>{_cell(cell)}</td>"
            for column, (cell, title) in enumerate(zip(row, titles or [""] * len(row), strict=True))
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    kind = "scroll headed" if head else "scroll facts"
    return f'<div class="{kind}"><table>{"".join(lines)}</table></div>'


class Html(str):
    """Text that is already HTML."""


def _cell(cell: object) -> str:
    return str(cell) if isinstance(cell, Html) else html.escape(str(cell))


class Embedder:
    """Embeds files into a page up to ``EMBED_BYTES``, and links the others.

    ``directory`` is the directory of the page.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._left = EMBED_BYTES

    def source(self, path: Path) -> str:
        """Return a ``data:`` URL of an MP4, or its relative path if it is too large or not a regular file."""
        try:
            content = read_regular_file(path, self._left)
        except OSError:
            return relative(path, self.directory)
        self._left -= len(content)
        return f"data:video/mp4;base64,{base64.b64encode(content).decode('ascii')}"

    def episode(self, path: Path, steps: int | None = None) -> str:
        """Return the video of an episode, ``episode_<number>_<outcome>.mp4``, framed in the colour of its outcome.

        ``steps`` is the length of the episode, if known.
        """
        number, _, outcome = path.stem.removeprefix("episode_").partition("_")
        length = "" if steps is None else f", {steps:,} steps"
        mark = {"success": "✓ ", "failure": "✗ "}.get(outcome, "")
        return (
            f'<figure class="{html.escape(outcome)}"><video muted loop autoplay playsinline'
            f' onclick="this.paused ? this.play() : this.pause()" src="{self.source(path)}"></video>'
            f"<figcaption>episode {html.escape(number.lstrip('0') or '0')}:"
            f" <b>{mark}{html.escape(outcome)}</b>{length}</figcaption></figure>"
        )


def relative(path: Path, directory: Path) -> str:
    """Return the relative URL of a file below ``directory``."""
    return quote(os.fsencode(path.relative_to(directory)))
