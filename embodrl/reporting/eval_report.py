"""The page of an evaluation: one HTML file with figures, bars with intervals, episodes and reproduction commands."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from embodrl.config.protocol import ProtocolReport
from embodrl.reporting.charts import histogram
from embodrl.reporting.intervals import CONFIDENCE_TEXT
from embodrl.reporting.page import Embedder, Html, figures, page, relative, table
from embodrl.reporting.paired import PairedFigures, change_text
from embodrl.types import Decoding

ROW_PX = 44
MAX_FAILURES = 200
UNPERTURBED = "unperturbed"


class Rate(TypedDict):
    """A success rate."""

    success_rate: float
    interval: tuple[float, float]


class TaskFigures(Rate):
    """The result of a task."""

    successes: int
    episodes: int
    instruction: str


class EpisodeFigures(TypedDict):
    """The result of an episode."""

    number: int
    seed: int
    task: str
    instruction: str
    success: bool
    success_at_end: bool | None
    episode_return: float
    length: int


class OtherFigures(TypedDict):
    """Results of the same episodes under another decoding; ``change`` is from the main figures to these."""

    success_rate: float | None
    interval: tuple[float, float]
    successes: int
    episodes: int
    lost_episodes: int
    change: PairedFigures
    per_episode: list[EpisodeFigures]


class AxisFigures(OtherFigures):
    """The result of the same episodes perturbed along an axis."""

    group: str
    description: str


class AgentFigures(TypedDict):
    """Means of an agent of a workflow over the episodes in which it acted; None without one."""

    success_rate: float | None
    mean_return: float | None
    mean_length: float | None


class EvalContent(TypedDict):
    """Content of eval.json; rate and means are None without an episode."""

    success_rate: float | None
    success_at_end: float | None
    interval: tuple[float, float]
    confidence: float
    successes: int
    solved_at_first_step: int
    episodes: int
    lost_episodes: int
    per_task: dict[str, float]
    per_agent: NotRequired[dict[str, AgentFigures]]
    mean_return: float | None
    mean_length: float | None
    seed: int
    tasks: dict[str, TaskFigures]
    settings: dict[str, object]
    protocol: ProtocolReport | None
    versions: dict[str, str]
    compute: dict[str, object]
    simulator: dict[str, object]
    first_pictures: dict[str, str]
    axes: dict[str, AxisFigures]
    decodings: dict[Decoding, OtherFigures]
    per_episode: list[EpisodeFigures]


def eval_page(content: EvalContent, title: str, directory: Path, grid: Path | None, videos: list[Path]) -> str:
    """Return the page; video paths are relative to ``directory``."""
    settings = content["settings"]
    rows = [(name, row) for name, row in content["tasks"].items()]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">{html.escape(_text(settings["tasks"]))} · {html.escape(_text(settings["date"]))}</p>',
        _figures(content),
    ]
    if rows:
        parts += ["<h2>Success by task</h2>", f'<div class="chart">{bars(rows)}</div>', _table(rows)]
    if len(content["decodings"]) > 1:
        parts += [
            "<h2>Success by how actions are chosen</h2>",
            f'<div class="chart">{bars(decoding_rows(content))}</div>',
        ]
        parts += [_decodings(content)]
    embedder = Embedder(directory)
    if content["axes"]:
        parts += ["<h2>Generalisation</h2>", f'<div class="chart">{bars(axis_rows(content))}</div>']
        parts += [_axes(content), _axis_videos(list(content["axes"]), embedder)]
    if grid is not None:
        parts += ["<h2>Episodes</h2>", _grid(grid, embedder)]
    parts += [_failures(content["per_episode"], embedder, videos), _histograms(content["per_episode"])]
    facts = [(name, _fact(name, value)) for name, value in settings.items()]
    parts += ["<h2>What was measured</h2>", table((), facts)]
    return page(title, parts)


def _figures(content: EvalContent) -> str:
    low, high = content["interval"]
    found = [(f"{content['episodes']:,}", "episodes"), (f"{content['lost_episodes']:,}", "without a result")]
    if content["episodes"]:
        found = [
            (f"{100 * (content['success_rate'] or 0.0):.1f} %", "success rate"),
            (f"{100 * low:.1f} to {100 * high:.1f} %", f"{CONFIDENCE_TEXT} interval"),
            (_rate(content["success_at_end"]), "solved at the end"),
            *found,
            (f"{content['mean_return'] or 0.0:.3g}", "mean return"),
            (f"{content['mean_length'] or 0.0:.1f}", "mean length, steps"),
        ]
    return figures(found)


def _rate(value: float | None) -> str:
    return "not known" if value is None else f"{100 * value:.1f} %"


def bars(rows: Sequence[tuple[str, Rate]]) -> str:
    """Return an inline SVG: name of each task or axis, a bar from 0 to 100 %, and a whisker for its interval.

    The SVG fills its container. Lengths are in percent, since scaling a drawing would scale its letters.
    """
    height = ROW_PX * len(rows) + 20
    parts: list[str] = []
    for tick in (0, 25, 50, 75, 100):
        for top in range(0, ROW_PX * len(rows), ROW_PX):  # behind the bars only: names and rates are above them
            parts.append(f'<line class="grid" x1="{tick}%" x2="{tick}%" y1="{top + 19}" y2="{top + 39}"/>')
        anchor = {0: "start", 100: "end"}.get(tick, "middle")
        parts.append(f'<text x="{tick}%" y="{height - 5}" text-anchor="{anchor}">{tick} %</text>')
    for number, (name, row) in enumerate(rows):
        top = ROW_PX * number
        middle = top + 29
        low, high = (f"{100 * bound:.2f}%" for bound in row["interval"])
        short = name if len(name) <= 32 else f"{name[:31]}…"
        caps = f'y1="{middle - 5}" y2="{middle + 5}"'
        parts += [
            f'<text x="0" y="{top + 15}"><title>{html.escape(name)}</title>{html.escape(short)}</text>',
            f'<text x="100%" y="{top + 15}" text-anchor="end">{_percent(row)}</text>',
            f'<rect x="0" y="{middle - 7}" width="{100 * row["success_rate"]:.2f}%" height="14" rx="2"'
            ' fill="var(--c0)"/>',
            '<g stroke="var(--fg)" stroke-width="1.3">'
            f'<line x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>'
            f'<line x1="{low}" x2="{low}" {caps}/><line x1="{high}" x2="{high}" {caps}/></g>',
        ]
    style = f"height: {height}px; overflow: visible"
    return f'<svg role="img" style="{style}" aria-label="success rates">{"".join(parts)}</svg>'


def axis_rows(content: EvalContent) -> list[tuple[str, Rate]]:
    """Return name and figures of the unperturbed episodes and of each axis with an episode."""
    plain: Rate = {"success_rate": content["success_rate"] or 0.0, "interval": content["interval"]}
    found = [(UNPERTURBED, plain)] if content["episodes"] else []
    for name, row in content["axes"].items():
        if row["success_rate"] is not None:
            found.append((name, {"success_rate": row["success_rate"], "interval": row["interval"]}))
    return found


def decoding_rows(content: EvalContent) -> list[tuple[str, Rate]]:
    """Return name and figures of each decoding with an episode."""
    return [
        (name, {"success_rate": row["success_rate"], "interval": row["interval"]})
        for name, row in content["decodings"].items()
        if row["success_rate"] is not None
    ]


def _decodings(content: EvalContent) -> str:
    head = ("actions", "successes", "episodes", "lost", "change on the same seeds", "p")
    lines = [
        (
            *(name, row["successes"], row["episodes"], row["lost_episodes"]),
            *((change_text(row["change"]), f"{row['change']['p_value']:.3f}") if number else ("", "")),
        )
        for number, (name, row) in enumerate(content["decodings"].items())
    ]
    note = f"Change in points from the first row, {CONFIDENCE_TEXT} interval of the paired difference; p of McNemar's"
    return table(head, lines) + f'<p class="sub">{note} exact test.</p>'


def _axes(content: EvalContent) -> str:
    head = ("axis", "group", "what is changed", "successes", "episodes", "change on the same seeds", "p")
    lines = [
        (
            *(name, row["group"], row["description"], row["successes"], row["episodes"]),
            *(change_text(row["change"]), f"{row['change']['p_value']:.3f}"),
        )
        for name, row in content["axes"].items()
    ]
    note = f"Change in points from the unperturbed episodes, {CONFIDENCE_TEXT} interval of the paired difference; p of"
    return table(head, lines) + f'<p class="sub">{note} McNemar\'s exact test.</p>'


def _axis_videos(names: Sequence[str], embedder: Embedder) -> str:
    """Return the first video of each axis, which `embodrl eval` writes into ``videos/AXIS``."""
    figures = [
        f'<figure><video muted loop autoplay playsinline src="{embedder.source(path)}"></video>'
        f"<figcaption>{html.escape(name)}</figcaption></figure>"
        for name in names
        for path in sorted((embedder.directory / "videos" / name).glob("[!.]*.mp4"))[:1]
    ]
    return f'<div class="videos">{"".join(figures)}</div>' if figures else ""


def _percent(row: Rate) -> str:
    low, high = row["interval"]
    return f"{100 * row['success_rate']:.1f} % ({100 * low:.0f} to {100 * high:.0f})"


def _table(rows: Sequence[tuple[str, TaskFigures]]) -> str:
    head = ("task", "instruction", "successes", "episodes", "success", f"{CONFIDENCE_TEXT} interval")
    lines: list[tuple[object, ...]] = []
    for name, row in rows:
        low, high = row["interval"]
        rate = f"{100 * row['success_rate']:.1f} %"
        interval = f"{100 * low:.1f} to {100 * high:.1f} %"
        lines.append((name, row["instruction"], row["successes"], row["episodes"], rate, interval))
    return table(head, lines)


def _grid(grid: Path, embedder: Embedder) -> str:
    return (
        '<p class="sub">The first evaluation episodes, not cherry-picked: grey while they run, then green with a tick,'
        " or red with a cross.</p>"
        f'<video controls muted loop autoplay playsinline style="max-width:100%" src="{embedder.source(grid)}"></video>'
    )


def _failures(episodes: Sequence[EpisodeFigures], embedder: Embedder, videos: list[Path]) -> str:
    """List the failed episodes with their seeds and videos, then the other videos."""
    by_number = {int(path.stem.split("_")[1]): path for path in videos}
    steps = {episode["number"]: episode["length"] for episode in episodes}
    failed = [episode for episode in episodes if not episode["success"]]
    filmed = [(by_number.pop(e["number"]), e["length"]) for e in failed if e["number"] in by_number]
    parts: list[str] = []
    if filmed:
        items = "".join(embedder.episode(path, length) for path, length in filmed)
        parts.append(f'<h2>Failures on video</h2><div class="videos">{items}</div>')
    if by_number:
        items = "".join(embedder.episode(path, steps.get(number)) for number, path in by_number.items())
        parts.append(f'<details><summary>Successes on video</summary><div class="videos">{items}</div></details>')
    if videos:
        links = ", ".join(
            f'<a href="{relative(path, embedder.directory)}">{html.escape(path.stem)}</a>' for path in videos
        )
        parts.append(f'<p class="sub">Files: {links}</p>')
    if failed:
        head = ("episode", "seed", "task", "return", "steps")
        rows = [
            (e["number"], e["seed"], e["task"], f"{e['episode_return']:.3g}", e["length"])
            for e in failed[:MAX_FAILURES]
        ]
        more = f", the first {MAX_FAILURES} of them" if len(failed) > MAX_FAILURES else ""
        summary = f"{len(failed)} failed episodes{more}" if len(failed) > 1 else "1 failed episode"
        shown = " open" if len(failed) <= 12 else ""
        parts += [
            "<h2>Failed episodes</h2>",
            f"<details{shown}><summary>{summary}</summary>{table(head, rows)}</details>",
        ]
    return "\n".join(parts)


def _length(episode: EpisodeFigures) -> float:
    return float(episode["length"])


def _return(episode: EpisodeFigures) -> float:
    return episode["episode_return"]


def _histograms(episodes: Sequence[EpisodeFigures]) -> str:
    charts = [
        histogram(
            title,
            [
                (name, colour, [value_of(e) for e in episodes if e["success"] == success])
                for name, colour, success in (("successes", "good", True), ("failures", "bad", False))
            ],
            label,
        )
        for title, value_of, label in (
            ("Episode lengths", _length, "environment steps"),
            ("Episode returns", _return, "sum of rewards"),
        )
    ]
    return f'<h2>Distribution</h2>\n<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _fact(name: str, value: object) -> object:
    text = html.escape(_text(value))
    return Html(f"<code>{text}</code>") if name in ("command", "weights", "weights SHA-256") else _text(value)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
