# SPDX-License-Identifier: Apache-2.0
"""Draw line charts and stacked bars as SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.report.text import escaped

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 38
# Colours that people with any colour vision tell apart (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
DASHES = ("", "6 3", "2 2", "8 2 2 2")
# More points than a chart has pixels are averaged.
MOST_POINTS = 300
# Least value of a logarithmic axis.
SMALLEST = 1e-30


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        label: what it is, in the legend and at each point.
        points: step -> value; both finite.
        colour, dash: index into ``COLOURS`` and ``DASHES``.
    """

    label: str
    points: Mapping[float, float]
    colour: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Axes:
    """Maps values to pixels.

    Attributes:
        x, y: least and greatest value of each axis.
        log: True if y is logarithmic.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False

    def px(self, x: float) -> float:
        """Return the horizontal pixel of a step."""
        return round(LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT), 2)

    def py(self, y: float) -> float:
        """Return the vertical pixel of a value."""
        low, high, y = (math.log10(v) if self.log else v for v in (*self.y, y))
        return round(HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 2)


def line_chart(title: str, unit: str, lines: Sequence[Line], *, log: bool = False) -> str:
    """Return a figure with curves over the steps.

    Args:
        title, unit: of the chart and of its vertical axis.
        lines: the curves. Values up to ``SMALLEST`` are left out of a logarithmic chart.
        log: logarithmic vertical axis.
    """
    kept = [replace(line, points={x: y for x, y in line.points.items() if y > SMALLEST or not log}) for line in lines]
    kept = [thinned(line) for line in kept if line.points]
    if not kept:
        return _figure(title, '<p class="empty">no values</p>', [])
    xs = [x for line in kept for x in line.points]
    ys = [y for line in kept for y in line.points.values()]
    axes = Axes(_range(xs), _log_range(ys) if log else _range(ys, 0.05), log)
    drawn = "".join(_curve(line, axes) for line in kept)
    return _figure(title, _svg(title, unit, axes, drawn), [(line.label, line.colour, line.dash) for line in kept])


def stacked_bars(title: str, unit: str, steps: Sequence[float], parts: Mapping[str, Sequence[float]]) -> str:
    """Return a figure with one bar per step.

    Args:
        title, unit: of the chart and of its vertical axis.
        steps: ascending.
        parts: label -> heights, one per step, none negative.
    """
    if not steps or not parts:
        return _figure(title, '<p class="empty">no values</p>', [])
    size = math.ceil(len(steps) / MOST_POINTS)
    steps = steps[::size]
    parts = {name: [_mean(values[i : i + size]) for i in range(0, len(values), size)] for name, values in parts.items()}
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    width = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 1.0
    axes = Axes((steps[0] - width / 2, steps[-1] + width / 2), (0.0, max(totals) * 1.05 or 1.0))
    drawn = []
    bottoms = [0.0] * len(steps)
    for index, (name, values) in enumerate(parts.items()):
        for place, (step, value) in enumerate(zip(steps, values, strict=True)):
            top = bottoms[place] + value
            left, right = axes.px(step - 0.4 * width), axes.px(step + 0.4 * width)
            drawn.append(
                f'<rect x="{left}" y="{axes.py(top)}" width="{right - left:.2f}" '
                f'height="{axes.py(bottoms[place]) - axes.py(top):.2f}" fill="{_colour(index)}">'
                f"<title>step {step:g}, {escaped(name)}: {value:.3g} {escaped(unit)}</title></rect>"
            )
            bottoms[place] = top
    return _figure(title, _svg(title, unit, axes, "".join(drawn)), [(name, i, 0) for i, name in enumerate(parts)])


def strip(values: Sequence[float], label: str) -> str:
    """Return a small bar for each value, in order: as high as the value is far below 0 (a logprob in nats)."""
    height, lowest = 24, min([-1.0, *values])
    bars = "".join(
        f'<rect x="{3 * i}" y="{height - (h := max(0.5, height * v / lowest)):.1f}" width="2" height="{h:.1f}">'
        f"<title>token {i + 1}: {v:.3f}</title></rect>"
        for i, v in enumerate(values)
    )
    return (
        f'<svg class="strip" role="img" aria-label="{escaped(label)}" width="{3 * len(values)}" height="{height}" '
        f'viewBox="0 0 {3 * len(values)} {height}">{bars}</svg>'
    )


def thinned(line: Line) -> Line:
    """Average neighbours of a curve that has more than ``MOST_POINTS`` points."""
    points = sorted(line.points.items())
    size = math.ceil(len(points) / MOST_POINTS)
    if size <= 1:
        return replace(line, points=dict(points))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = {_mean([x for x, _ in group]): _mean([y for _, y in group]) for group in groups}
    return replace(line, label=f"{line.label} (means of {size} steps)", points=means)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)


def _range(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * margin or (0.5 if margin == 0.0 else abs(high) * 0.1 or 0.5) * (low == high)
    return low - room, high + room


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** (math.floor(math.log10(max(values))) + 1)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round values within an interval, some ``about`` of them."""
    step = (high - low) / about
    power = 10.0 ** math.floor(math.log10(step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)
    return [float(f"{step * i:.10g}") for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 5)))]


def _curve(line: Line, axes: Axes) -> str:
    places = [(axes.px(x), axes.py(y), x, y) for x, y in line.points.items()]
    path = " ".join(f"{px},{py}" for px, py, _, _ in places)
    dots = "".join(
        f'<circle cx="{px}" cy="{py}" r="2"><title>{escaped(line.label)}, step {x:g}: {y:.5g}</title></circle>'
        for px, py, x, y in places
    )
    colour, dash = _colour(line.colour), DASHES[line.dash % len(DASHES)]
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"/>'
        f'<g fill="{colour}">{dots}</g>'
    )


def _svg(title: str, unit: str, axes: Axes, drawn: str) -> str:
    grid = []
    for value in _log_ticks(*axes.y) if axes.log else ticks(*axes.y):
        y = axes.py(value)
        grid.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        grid.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for value in ticks(*axes.x):
        if value == int(value):
            x = axes.px(value)
            grid.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(title)}"><g class="grid">{"".join(grid)}'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>'
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escaped(unit)}</text></g>'
        f"{drawn}</svg>"
    )


def _figure(title: str, body: str, legend: Sequence[tuple[str, int, int]]) -> str:
    keys = "".join(
        f'<span><svg width="26" height="8"><line x1="0" y1="4" x2="26" y2="4" stroke="{_colour(colour)}" '
        f'stroke-width="3" stroke-dasharray="{DASHES[dash % len(DASHES)]}"/></svg> {escaped(label)}</span>'
        for label, colour, dash in legend
    )
    return f'<figure><figcaption>{escaped(title)}</figcaption>{body}<div class="legend">{keys}</div></figure>'


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
