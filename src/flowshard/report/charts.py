"""Charts as inline SVG. Colours are the variables --c1 to --c8 of the page, so that they follow its theme."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from flowshard.report.series import Points

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 72, 26, 12, 44
COLOURS = 8
_WIDE = 50.0
"""Ratio of highest to lowest value from which a logarithmic axis shows more."""
_DASHES = ("", "6 4", "2 3")
"""Of lines that share a colour, as there are more lines than colours."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    points: Points
    colour: int = 0
    """From 0; beyond the number of colours they come again, dashed."""
    faint: bool = False
    """Thin and pale, without a place in the legend: what another line is the mean of."""
    marks: bool = False
    """With a mark at each point."""


@dataclass(frozen=True)
class Axis:
    """A range of values with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """From 0 at the low end to 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(low: float, high: float, *, whole: bool = False, tight: bool = False, ticks: int = 5) -> Axis:
    """An axis with ticks at round values.

    Args:
        low: least value.
        high: largest value.
        whole: whether only whole numbers get a tick.
        tight: whether the axis ends at these values and not at the ticks around them.
        ticks: about how many.
    """
    if not high > low:
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    step = _round_step((high - low) / ticks)
    if whole:
        step = max(step, 1.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    if not tight:
        low, high = first * step, last * step
    # Of 15 digits, so that 3 * 0.1 is 0.3.
    values = (float(f"{index * step:.15g}") for index in range(first, last + 1))
    return Axis(low, high, tuple(value for value in values if low - step / 1e6 <= value <= high + step / 1e6))


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis, for values above 0, with ticks at powers of ten, or at 1, 2 and 5 times them if these are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = -(-(last - first) // 6)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return Axis(10.0**first, 10.0**last, tuple(tick for tick in ticks if tick <= 10.0**last), log=True)


def value_axis(values: Sequence[float], *, log: bool, from_zero: bool) -> Axis:
    """The vertical axis for these finite values.

    Args:
        values: at least one.
        log: logarithmic, if they are positive and their range is wide.
        from_zero: whether the axis begins at 0.
    """
    low, high = min(values), max(values)
    if log and low > 0 and high / low > _WIDE:
        return log_axis(low, high)
    return linear_axis(min(low, 0.0) if from_zero else low, high)


def short(value: float) -> str:
    """A number in about four digits, as a person would write it."""
    if not math.isfinite(value):
        return "no number"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def line_chart(
    title: str, lines: Sequence[Line], *, unit: str = "", log: bool = False, from_zero: bool = False, note: str = ""
) -> str:
    """Lines over the steps as a figure; empty text if there is nothing to draw.

    Args:
        title: of the figure.
        lines: at least one.
        unit: of the values, for the title.
        log: logarithmic, if the range is wide.
        from_zero: whether the axis begins at 0.
        note: under the title.
    """
    xs = [x for line in lines for x, y in zip(*line.points, strict=True) if math.isfinite(y)]
    ys = [y for line in lines for y in line.points[1] if math.isfinite(y)]
    if not ys:
        return ""
    across, up = (
        linear_axis(min(xs), max(xs), whole=True, tight=True, ticks=4),
        value_axis(ys, log=log, from_zero=from_zero),
    )
    drawn = "".join(_draw(line, across, up) for line in lines)
    keys = [(line.colour, line.label, _last(line)) for line in lines if not line.faint]
    return _figure(title, unit + ", logarithmic" * up.log, note, _legend(keys), _frame(across, up) + drawn, across)


def area_chart(title: str, xs: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], *, unit: str) -> str:
    """Values of at least 0 on top of one another over the steps, as a figure; empty text if there are none."""
    if not xs:
        return ""
    tops = [0.0] * len(xs)
    stacked = []
    for _, values in layers:
        floor, tops = tops, [below + value for below, value in zip(tops, values, strict=True)]
        stacked.append((floor, tops))
    across, up = linear_axis(min(xs), max(xs), whole=True, tight=True, ticks=4), linear_axis(0.0, max(tops))
    drawn = []
    for index, ((label, values), (floor, top)) in enumerate(zip(layers, stacked, strict=True)):
        edge = [*zip(xs, top, strict=True), *reversed([*zip(xs, floor, strict=True)])]
        outline = "L".join(f"{_x(across, x):.1f} {_y(up, y):.1f}" for x, y in edge)
        drawn.append(
            f'<path class="area" d="M{outline}Z" fill="{_colour(index)}" {_values(label, index, (list(xs), list(values)))}/>'
        )
    keys = [(index, label, short(values[-1])) for index, (label, values) in enumerate(layers)]
    return _figure(title, unit, "", _legend(keys), _frame(across, up) + "".join(drawn), across)


def stacked_bars(title: str, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], *, unit: str) -> str:
    """One bar a row, made of parts, as a figure."""
    largest = max((sum(values) for _, values in rows), default=0.0)
    if not largest:
        return ""
    bars = []
    for name, values in rows:
        pieces = "".join(
            f'<i style="width:{100 * value / largest:.3f}%;background:{_colour(index)}" '
            f'title="{escape(part)} {short(value)} {escape(unit)}"></i>'
            for index, (part, value) in enumerate(zip(parts, values, strict=True))
        )
        bars.append(f'<p class="row">{escape(name)}: {short(sum(values))}</p><div class="bar">{pieces}</div>')
    return (
        f"<figure><figcaption><h3>{escape(title)}{_in(unit)}</h3>"
        f"{_legend([(index, part, '') for index, part in enumerate(parts)])}</figcaption>{''.join(bars)}</figure>"
    )


def _draw(line: Line, across: Axis, up: Axis) -> str:
    places: list[list[str]] = [[]]
    for x, y in zip(*line.points, strict=True):
        if math.isfinite(y):
            places[-1].append(f"{_x(across, x):.1f} {_y(up, y):.1f}")
        elif places[-1]:
            places.append([])
    # A line of length 0 with round ends is a dot, which a point between two breaks has to be.
    route = "".join(f"M{'L'.join(part)}{'h0' * (len(part) == 1)}" for part in places if part)
    dash = _DASHES[line.colour // COLOURS % len(_DASHES)]
    look = f'class="line{" faint" * line.faint}" stroke="{_colour(line.colour)}"'
    if dash:
        look += f' stroke-dasharray="{dash}"'
    text = f'<path {look} d="{route}" {_values(line.label, line.colour, line.points)}/>'
    if line.marks:
        dots = "".join(f"M{place}h0" for part in places for place in part)
        text += f'<path class="marks" stroke="{_colour(line.colour)}" d="{dots}"/>'
    return text


def _values(label: str, colour: int, points: Points) -> str:
    """What the page's script shows of a line under the pointer."""
    xs = ",".join(f"{x:.0f}" for x in points[0])
    ys = ",".join(f"{y:.5g}" if math.isfinite(y) else "" for y in points[1])
    return f'data-label="{escape(label)}" data-colour="{_colour(colour)}" data-x="{xs}" data-y="{ys}"'


def _colour(index: int) -> str:
    return f"var(--c{index % COLOURS + 1})"


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _frame(across: Axis, up: Axis) -> str:
    """Grid lines and tick labels."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, text in zip(up.ticks, _tick_texts(up), strict=True):
        y = _y(up, value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4.5:.1f}" text-anchor="end">{text}</text>')
    for value, text in zip(across.ticks, _tick_texts(across), strict=True):
        x = _x(across, value)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{text}</text>')
    return "".join(parts)


def _tick_texts(axis: Axis) -> Iterator[str]:
    if axis.log or len(axis.ticks) < 2:
        yield from (short(tick) for tick in axis.ticks)
        return
    largest = max(abs(tick) for tick in axis.ticks)
    step = axis.ticks[1] - axis.ticks[0]
    if largest >= 1e6 or largest < 1e-3:  # all ticks in the same power of ten
        power = math.floor(math.log10(largest) + 1e-9)
        digits = max(power - math.floor(math.log10(step) + 1e-9), 0)
        yield from ("0" if tick == 0 else f"{tick / 10.0**power:.{digits}f}e{power}" for tick in axis.ticks)
        return
    digits = max(-math.floor(math.log10(step) + 1e-9), 0)
    yield from (f"{tick:,.{digits}f}" for tick in axis.ticks)


def _last(line: Line) -> str:
    return next((short(y) for y in reversed(line.points[1]) if math.isfinite(y)), "")


def _in(unit: str) -> str:
    return f" <small>{escape(unit.removeprefix(', '))}</small>" if unit else ""


def _legend(keys: Sequence[tuple[int, str, str]]) -> str:
    """Colour, name and last value of each line."""
    items = "".join(
        f'<li><i style="background:{_colour(colour)}"></i>{escape(label)}{f" <b>{value}</b>" if value else ""}</li>'
        for colour, label, value in keys
    )
    return f'<ul class="legend">{items}</ul>'


def _figure(title: str, unit: str, note: str, legend: str, drawing: str, across: Axis) -> str:
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    plot = f"{LEFT},{WIDTH - RIGHT},{TOP},{HEIGHT - BOTTOM}"
    scale = f'data-low="{across.low:.15g}" data-high="{across.high:.15g}" data-plot="{plot}"'
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}{_in(unit)}</h3>{legend}{below}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" {scale}>{drawing}'
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">step</text>'
        f'<path class="pointer" d=""/></svg><div class="values" hidden></div></figure>'
    )
