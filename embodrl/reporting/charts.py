"""Charts as inline SVG: they scale with the page, take its colours (light and dark) and need no script."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 36
NARROW, WIDE = (360, 200), (960, 300)


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        label: for the legend.
        points: (x, y) in the order of x.
        colour: CSS variable of the page, e.g. ``c0``.
        intervals: (low, high) of each point, drawn as whiskers; empty for none.
        tips: text of each point, shown when the pointer rests on it; empty for none.
        dashed: draw a thinner, dashed line.
        dots: mark every point.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: str = "c0"
    intervals: Sequence[tuple[float, float]] = field(default=())
    tips: Sequence[str] = field(default=())
    dashed: bool = False
    dots: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str = "iteration",
    percent: bool = False,
    y_range: tuple[float, float] | None = None,
    wide: bool = False,
) -> str:
    """Return a chart as HTML; "" if no series has a point. A wide one has a second drawing for phones.

    Args:
        title: above the chart.
        series: lines.
        x_label: below the chart.
        percent: y is a fraction, shown in percent.
        y_range: least extent of the y axis; the data may widen it.
        wide: as wide as the page.
    """
    series = [each for each in series if each.points]
    if not series:
        return ""
    sizes = [("wide", WIDE, 12), ("narrow", NARROW, 6)] if wide else [("", NARROW, 6)]
    drawings = [
        _svg(title, kind, size, _draw_lines(series, size, most, x_label, percent, y_range))
        for kind, size, most in sizes
    ]
    return _frame(title, _legend(series), drawings, wide)


def _draw_lines(
    series: Sequence[Series],
    size: tuple[int, int],
    most_ticks: int,
    x_label: str,
    percent: bool,
    y_range: tuple[float, float] | None,
) -> list[str]:
    width, height = size
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points] + [
        y for each in series for pair in each.intervals for y in pair
    ]
    x_ticks = integer_ticks(min(xs), max(xs), most_ticks)
    y_ticks = nice_ticks(*_extent([*ys, *(y_range or ())]), 5)
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def x_at(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (width - LEFT - RIGHT)

    def y_at(y: float) -> float:
        return TOP + (y_high - y) / (y_high - y_low) * (height - TOP - BOTTOM)

    parts: list[str] = []
    for tick in y_ticks:
        y = y_at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = (
            tick_text(100 * tick, 100 * (y_ticks[1] - y_ticks[0])) + " %"
            if percent
            else tick_text(tick, y_ticks[1] - y_ticks[0])
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x_at(tick):.1f}" y="{height - 18}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{height - 3}" text-anchor="middle">{x_label}</text>')
    for each in series:
        parts += _draw(
            each, [(x_at(x), y_at(y)) for x, y in each.points], [tuple(map(y_at, p)) for p in each.intervals]
        )
    return parts


def _draw(series: Series, points: list[tuple[float, float]], whiskers: list[tuple[float, ...]]) -> list[str]:
    colour = f"var(--{series.colour})"
    parts = [
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
        for (x, _), (low, high) in zip(points, whiskers, strict=False)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="4 3" stroke-width="1.2"' if series.dashed else ""
    parts.append(f'<polyline class="series" stroke="{colour}"{dash} points="{path}"/>')
    if series.dots or len(points) == 1:
        tips = series.tips or [""] * len(points)
        for (x, y), tip in zip(points, tips, strict=True):
            title = f"<title>{html.escape(tip)}</title>" if tip else ""
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}">{title}</circle>')
    return parts


def stacked_chart(title: str, labels: Sequence[str], colours: Sequence[str], columns: dict[int, list[float]]) -> str:
    """Return a chart of stacked bars as HTML, one per iteration; "" without any.

    Args:
        title: above the chart.
        labels: of the parts.
        colours: CSS variables of the parts.
        columns: iteration -> the parts' sizes.
    """
    if not columns:
        return ""
    width, height = NARROW
    y_ticks = nice_ticks(0.0, max(map(sum, columns.values())) or 1.0, 5)
    low, high = min(columns), max(columns)
    slot = (width - LEFT - RIGHT) / (high - low + 1)
    scale = (height - TOP - BOTTOM) / y_ticks[-1]
    parts: list[str] = []
    for tick in y_ticks:
        y = height - BOTTOM - tick * scale
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_text(tick, y_ticks[1])}</text>')
    for iteration, sizes in columns.items():
        x, y = LEFT + (iteration - low + 0.1) * slot, float(height - BOTTOM)
        for label, colour, size in zip(labels, colours, sizes, strict=True):
            y -= size * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{min(0.8 * slot, 60):.1f}" height="{size * scale:.1f}"'
                f' fill="var(--{colour})"><title>iteration {iteration}, {label}: {size:.1f} s</title></rect>'
            )
    for tick in integer_ticks(low, high, 6):
        x = LEFT + (tick - low + 0.1) * slot + min(0.4 * slot, 30)
        parts.append(f'<text x="{x:.1f}" y="{height - 18}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{height - 3}" text-anchor="middle">iteration</text>')
    legend = _legend([Series(label, [(0, 0)], colour) for label, colour in zip(labels, colours, strict=True)])
    return _frame(title, legend, [_svg(title, "", NARROW, parts)], False)


def histogram(title: str, groups: Sequence[tuple[str, str, Sequence[float]]], x_label: str, bins: int = 12) -> str:
    """Return stacked bars of how often values occur, as HTML; "" without a value.

    Args:
        title: above the chart.
        groups: (label, CSS variable, values) each.
        x_label: below the chart.
        bins: at most.
    """
    values = [value for _, _, group in groups for value in group]
    if not values:
        return ""
    edges = nice_ticks(min(values), max(values), bins)
    step = edges[1] - edges[0]
    counts = [
        [sum(1 for v in group if min(int((v - edges[0]) / step), len(edges) - 2) == i) for i in range(len(edges) - 1)]
        for _, _, group in groups
    ]
    width, height = NARROW
    y_ticks = [t for t in nice_ticks(0.0, float(max(map(sum, zip(*counts, strict=True)))), 4) if t == int(t)]
    slot, scale = (width - LEFT - RIGHT) / (len(edges) - 1), (height - TOP - BOTTOM) / y_ticks[-1]
    parts: list[str] = []
    for tick in y_ticks:
        y = height - BOTTOM - tick * scale
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for i in range(len(edges) - 1):
        y = float(height - BOTTOM)
        for (label, colour, _), group in zip(groups, counts, strict=True):
            y -= group[i] * scale
            tip = f"{short(edges[i])} to {short(edges[i + 1])}: {group[i]} {label}"
            parts.append(
                f'<rect x="{LEFT + i * slot + 1:.1f}" y="{y:.1f}" width="{slot - 2:.1f}"'
                f' height="{group[i] * scale:.1f}" fill="var(--{colour})"><title>{html.escape(tip)}</title></rect>'
            )
    every = math.ceil(len(edges) / 7)
    for i, edge in enumerate(edges[::every]):
        x = LEFT + i * every * slot
        parts.append(f'<text x="{x:.1f}" y="{height - 18}" text-anchor="middle">{tick_text(edge, step)}</text>')
    parts.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{height - 3}" text-anchor="middle">{x_label}</text>')
    legend = _legend([Series(label, [(0, 0)], colour) for label, colour, _ in groups])
    return _frame(title, legend, [_svg(title, "", NARROW, parts)], False)


def _svg(title: str, kind: str, size: tuple[int, int], parts: list[str]) -> str:
    attributes = f'viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{html.escape(title)}"'
    return f'<svg class="{kind}" {attributes}>{"".join(parts)}</svg>'


def _frame(title: str, legend: str, drawings: list[str], wide: bool) -> str:
    kind = "chart wide" if wide else "chart"
    return f'<div class="{kind}"><h3>{html.escape(title)}</h3>{legend}{"".join(drawings)}</div>'


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2 and not any(each.intervals for each in series):
        return ""
    items = "".join(
        f'<span><i class="{"dashed" if each.dashed else ""}" style="color:var(--{each.colour})"></i>'
        f"{html.escape(each.label)}</span>"
        for each in series
    )
    return f'<div class="legend">{items}</div>'


def integer_ticks(low: float, high: float, most: int) -> list[int]:
    """Return at most ``most`` + 1 whole numbers from ``low`` to ``high`` at a round distance."""
    step = max(1, round(_nice_step((high - low) / most))) if high > low else 1
    return list(range(math.ceil(low / step) * step, math.floor(high) + 1, step))


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers at equal distances that enclose ``low`` to ``high``."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    step = _nice_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _nice_step(size: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))


def _extent(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def tick_text(value: float, step: float) -> str:
    """Return a tick with as many decimals as ticks at distance ``step`` need."""
    if abs(value) >= 1000 or step >= 1000:
        return short(value)
    if not value:
        return "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}" if decimals <= 3 else f"{value:.0e}".replace("e-0", "e-")


def short(value: float) -> str:
    """Return a number in few characters: 1200 as 1.2k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}"
