"""Charts as inline SVG, which scale with the page, use its light and dark colours, and need no script."""

from __future__ import annotations

import html
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from embodrl.reporting.rows import is_number

LEFT = 46
RIGHT = 12
TOP = 8
BOTTOM = 36
NARROW = (360, 200)
WIDE = (960, 300)
MAX_POINTS = 1000
LEAST_POINTS = 50
"""Limit on points per chart, and minimum per line; longer lines keep only the extremes of neighbouring points."""
MAX_BARS = 150
FLAT = 1e-9
"""A range smaller than this fraction of its values is rounding error, and drawn as a constant."""
SMALLEST = 1e-290
"""Smaller values are drawn as zero, since their differences can't be divided."""
UNITS = ((9, "G"), (6, "M"), (3, "k"))
LABEL_CHARACTERS = 7


@dataclass(frozen=True)
class Series:
    """A line of a chart; non-finite points are left out.

    Attributes:
        points: (x, y), ascending in x.
        colour: CSS variable of the page, e.g. ``c0``.
        intervals: (low, high) of each point, drawn as whiskers, or None; empty for no intervals.
        tips: tooltip of each point; empty for none.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: str = "c0"
    intervals: Sequence[tuple[float, float] | None] = field(default=())
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
    """Return a chart as HTML; "" if no series has a point. A wide chart has a second drawing for phones.

    With ``percent``, y is a fraction. ``y_range`` is the minimum range of the y axis; the data may widen it.
    """
    most = max(LEAST_POINTS, MAX_POINTS // (len(series) or 1))
    series = [drawn for each in series if (drawn := _thinned(_finite(each), most)).points]
    if not series:
        return ""
    sizes = [("wide", WIDE, 12), ("narrow", NARROW, 6)] if wide else [("", NARROW, 6)]
    drawings = [
        _svg(title, kind, size, _draw_lines(series, size, most, x_label, percent, y_range))
        for kind, size, most in sizes
    ]
    return _frame(title, _legend(series), drawings, wide)


def _finite(series: Series) -> Series:
    """Return the finite points of a line, with their intervals and tooltips."""
    kept = [index for index, point in enumerate(series.points) if all(map(is_number, point))]
    intervals = [pair if pair is not None and all(map(is_number, pair)) else None for pair in series.intervals]
    return _chosen(replace(series, intervals=intervals), kept)


def _thinned(series: Series, most: int) -> Series:
    """Return a line of at most about ``most`` points: the minimum and maximum of each bucket of neighbours."""
    count = len(series.points)
    if count <= most:
        return series
    size = math.ceil(2 * count / max(2, most))
    kept: set[int] = {0, count - 1}
    for start in range(0, count, size):
        bucket = range(start, min(start + size, count))
        kept |= {pick(bucket, key=lambda index: series.points[index][1]) for pick in (min, max)}
    return _chosen(series, sorted(kept))


def _chosen(series: Series, indices: Sequence[int]) -> Series:
    points, intervals, tips = ([part[i] for i in indices] if part else () for part in _parts(series))
    return replace(series, points=points, intervals=intervals, tips=tips)


def _parts(series: Series) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    return series.points, series.intervals, series.tips


def _draw_lines(
    series: Sequence[Series],
    size: tuple[int, int],
    most_ticks: int,
    x_label: str,
    percent: bool,
    y_range: tuple[float, float] | None,
) -> list[str]:
    width, height = size
    xs = [float(x) for each in series for x, _ in each.points]
    ys = [float(y) for each in series for _, y in each.points]
    ys += [float(y) for each in series for pair in each.intervals if pair is not None for y in pair]
    ys += y_range or ()
    y_ticks = nice_ticks(min(ys), max(ys), 5)
    x_low = min(xs)
    x_half = max(max(xs) / 2 - min(xs) / 2, FLAT * abs(min(xs)), 0.5)

    def x_at(x: float) -> float:
        return LEFT + (x / 2 - x_low / 2) / x_half * (width - LEFT - RIGHT)

    def y_at(y: float) -> float:
        return height - BOTTOM - y_ticks.part(y) * (height - TOP - BOTTOM)

    parts = _y_axis(y_ticks, size, 100 if percent else 1, " %" if percent else "")
    x_ticks = integer_ticks(min(xs), max(xs), most_ticks)
    for tick, text in zip(x_ticks.values, x_ticks.texts(), strict=True):
        parts.append(_x_text(x_at(tick), height, text))
    parts.append(_x_title(size, x_label))
    for each in series:
        parts += _draw(
            each,
            [(x_at(float(x)), y_at(float(y))) for x, y in each.points],
            [None if pair is None else (y_at(float(pair[0])), y_at(float(pair[1]))) for pair in each.intervals],
        )
    return parts


def _y_axis(ticks: Ticks, size: tuple[int, int], factor: int = 1, unit: str = "") -> list[str]:
    width, height = size
    parts: list[str] = []
    for number, text in enumerate(ticks.texts(factor)):
        y = height - BOTTOM - number / (ticks.last - ticks.first) * (height - TOP - BOTTOM)
        shown = text + unit
        squeezed = f' textLength="{LEFT - 8}" lengthAdjust="spacingAndGlyphs"' * (len(shown) > LABEL_CHARACTERS)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end"{squeezed}>{shown}</text>')
    return parts


def _x_text(x: float, height: int, text: str) -> str:
    return f'<text x="{x:.1f}" y="{height - 18}" text-anchor="middle">{text}</text>'


def _x_title(size: tuple[int, int], text: str) -> str:
    width, height = size
    return f'<text x="{(LEFT + width - RIGHT) / 2}" y="{height - 3}" text-anchor="middle">{text}</text>'


def _draw(series: Series, points: list[tuple[float, float]], whiskers: list[tuple[float, float] | None]) -> list[str]:
    colour = f"var(--{series.colour})"
    parts = [
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{pair[0]:.1f}" y2="{pair[1]:.1f}" stroke="{colour}"/>'
        for (x, _), pair in zip(points, whiskers, strict=False)
        if pair is not None
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


def stacked_chart(
    title: str, labels: Sequence[str], colours: Sequence[str], columns: Mapping[int, Sequence[float]]
) -> str:
    """Return a chart of stacked bars as HTML, one per iteration; "" without any.

    ``columns`` maps an iteration to the sizes of its parts. With many iterations, a bar shows the mean of neighbouring
    ones. An iteration without finite sizes has no bar.
    """
    bars = list(_bars(columns))
    if not bars:
        return ""
    width, height = NARROW
    y_ticks = nice_ticks(0.0, max(sum(sizes) for *_, sizes in bars) or 1.0, 5)
    low = bars[0][0]
    high = bars[-1][1]
    slot = (width - LEFT - RIGHT) / (high - low + 1)
    parts = _y_axis(y_ticks, NARROW)
    for first, last, sizes in bars:
        x = LEFT + (first - low + 0.1) * slot
        top = 0.0
        bar_px = min(0.8 * slot * (last - first + 1), 60)
        when = f"iteration {first}" if first == last else f"mean of iterations {first} to {last}"
        for label, colour, size in zip(labels, colours, sizes, strict=True):
            top += size
            y, y_below = (height - BOTTOM - y_ticks.part(at) * (height - TOP - BOTTOM) for at in (top, top - size))
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar_px:.1f}" height="{max(0.0, y_below - y):.1f}"'
                f' fill="var(--{colour})"><title>{when}, {html.escape(label)}: {size:.1f} s</title></rect>'
            )
    x_ticks = integer_ticks(low, high, 6)
    for tick, text in zip(x_ticks.values, x_ticks.texts(), strict=True):
        parts.append(_x_text(LEFT + (tick - low + 0.1) * slot + min(0.4 * slot, 30), height, text))
    parts.append(_x_title(NARROW, "iteration"))
    legend = _legend([Series(label, [(0, 0)], colour) for label, colour in zip(labels, colours, strict=True)])
    return _frame(title, legend, [_svg(title, "", NARROW, parts)], False)


def _bars(columns: Mapping[int, Sequence[float]]) -> Iterator[tuple[int, int, list[float]]]:
    """Yield first and last iteration and mean sizes of at most ``MAX_BARS`` bars; negative parts become 0."""
    found = [(at, [max(0.0, float(size)) for size in columns[at] if is_number(size)]) for at in sorted(columns)]
    whole = [(at, sizes) for at, sizes in found if len(sizes) == len(columns[at]) and math.isfinite(2 * sum(sizes))]
    each = math.ceil(len(whole) / MAX_BARS) or 1
    for start in range(0, len(whole), each):
        group = whole[start : start + each]
        means = [sum(size / len(group) for size in sizes) for sizes in zip(*(sizes for _, sizes in group), strict=True)]
        yield group[0][0], group[-1][0], list(map(float, means))


def histogram(title: str, groups: Sequence[tuple[str, str, Sequence[float]]], x_label: str, bins: int = 12) -> str:
    """Return a stacked histogram as HTML; "" without a value. ``groups`` are (label, CSS variable, values)."""
    finite = [[float(value) for value in group if is_number(value)] for _, _, group in groups]
    if not any(finite):
        return ""
    edges = nice_ticks(min(map(min, filter(None, finite))), max(map(max, filter(None, finite))), bins)
    count = edges.last - edges.first
    counts = [Counter(min(max(int(edges.part(value) * count), 0), count - 1) for value in group) for group in finite]
    width, height = NARROW
    y_ticks = nice_ticks(0.0, float(max(sum(each[i] for each in counts) for i in range(count))), 4, whole=True)
    slot = (width - LEFT - RIGHT) / count
    scale = (height - TOP - BOTTOM) * y_ticks.part(1.0)
    parts = _y_axis(y_ticks, NARROW)
    texts = edges.texts()
    for i in range(count):
        y = float(height - BOTTOM)
        for (label, colour, _), group in zip(groups, counts, strict=True):
            y -= group[i] * scale
            tip = f"{texts[i]} to {texts[i + 1]}: {group[i]} {label}"
            parts.append(
                f'<rect x="{LEFT + i * slot + 1:.1f}" y="{y:.1f}" width="{slot - 2:.1f}"'
                f' height="{group[i] * scale:.1f}" fill="var(--{colour})"><title>{html.escape(tip)}</title></rect>'
            )
    every = math.ceil((count + 1) / 7)
    parts += [_x_text(LEFT + i * slot, height, texts[i]) for i in range(0, count + 1, every)]
    parts.append(_x_title(NARROW, x_label))
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


@dataclass(frozen=True)
class Ticks:
    """Evenly spaced round numbers: ``first`` to ``last`` times ``factor * 10**exponent``."""

    factor: int
    exponent: int
    first: int
    last: int

    @property
    def step(self) -> float:
        return float(f"{self.factor}e{self.exponent}")

    @property
    def values(self) -> list[float]:
        """The ticks; infinite beyond the largest float."""
        return [float(f"{i * self.factor}e{self.exponent}") for i in range(self.first, self.last + 1)]

    def part(self, value: float) -> float:
        """Return the position of a value: 0 at the first tick, 1 at the last."""
        return (value / self.step - self.first) / (self.last - self.first)

    def texts(self, times: int = 1) -> list[str]:
        """Return the ticks, times 1 or 100, as exact text, so that no two look the same."""
        exponent = self.exponent + len(str(times)) - 1
        values = [Decimal(i * self.factor).scaleb(exponent) for i in range(self.first, self.last + 1)]
        largest = max(map(abs, values), default=Decimal(0))
        if (largest < Decimal("0.01") and exponent < -3) or largest >= 10**15:
            return [_power(value) for value in values]
        # A unit that needs more than two decimals saves no characters.
        units = [(power, unit) for power, unit in UNITS if largest >= 10 ** max(power, 4) and power - exponent <= 2]
        power, unit = units[0] if units else (0, "")
        decimals = max(0, power - exponent)
        return [f"{value.scaleb(-power):.{decimals}f}{unit}" if value else "0" for value in values]


def _power(value: Decimal) -> str:
    """Return a number as ``1.5e-4``, with all its digits."""
    if not value:
        return "0"
    sign, digits, exponent = value.normalize().as_tuple()
    first, *rest = map(str, digits)
    return f"{'-' * sign}{first}{'.' * bool(rest)}{''.join(rest)}e{int(exponent) + len(rest)}"


def integer_ticks(low: float, high: float, most: int) -> Ticks:
    """Return at most ``most`` + 1 evenly spaced round integers from ``low`` to ``high``; may be empty."""
    factor, exponent = _nice_step(max(_share(low, high, most), 1.0))
    step = factor * 10**exponent
    return Ticks(factor, exponent, -(-math.ceil(low) // step), math.floor(high) // step)


def nice_ticks(low: float, high: float, most: int, whole: bool = False) -> Ticks:
    """Return evenly spaced round numbers, or round integers, that enclose ``low`` to ``high``."""
    magnitude = max(abs(low), abs(high))
    magnitude = magnitude if magnitude > SMALLEST else 1.0
    if high / 2 - low / 2 < FLAT * magnitude / 2:
        most_finite = sys.float_info.max
        low = max(low - magnitude / 2, -most_finite)
        high = min(high + magnitude / 2, most_finite)
    factor, exponent = _nice_step(max(_share(low, high, most), 1.0 if whole else 0.0))
    step = Ticks(factor, exponent, 0, 1).step
    return Ticks(factor, exponent, math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9))


def _share(low: float, high: float, parts: int) -> float:
    """Return the length of one of equal parts of a range that may exceed the largest float."""
    return (high - low) / parts if math.isfinite(high - low) else high / parts - low / parts


def _nice_step(size: float) -> tuple[int, int]:
    """Return factor and exponent of the smallest of 1, 2, 5 times a power of ten that is at least ``size``."""
    exponent = math.floor(math.log10(size))
    for factor in (1, 2, 5):
        if factor * 10.0**exponent >= size * (1 - 1e-9):
            return factor, exponent
    return 1, exponent + 1
