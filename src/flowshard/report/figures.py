"""From the numbers of runs to the charts of the page."""

import math
from collections.abc import Callable, Iterator, Sequence

from flowshard.report.charts import Line, area_chart, line_chart, stacked_bars
from flowshard.report.data import QUARTILES, Run, Table, quartile
from flowshard.report.series import Points, means, present, smooth, thin

_PARTS = ("data", "forward", "backward", "optimizer")
"""Of a step's time."""
_NAMES = {
    "grad_norm": "gradient norm",
    "samples_per_second": "samples",
    "tokens_per_second": "tokens",
    "mfu": "utilisation",
    "seconds_communication": "part of forward and backward",
    "memory_peak_bytes": "memory",
}
"""What legends call a number whose own name does not read well."""
_RECENT = 50
"""Steps that a mean of now is of."""


def span(table: Table) -> float:
    """Steps over which a run is smoothed."""
    return span_of(len(table))


def span_of(count: int) -> float:
    """Values over which so many are smoothed: a fiftieth of them, or 5, but not more than a tenth of a short run."""
    return max(count / 50, min(count / 10, 5.0))


def smoothed_loss(run: Run) -> list[float]:
    """At every step."""
    return smooth(run.metrics.columns["loss"], span(run.metrics))


def recent(run: Run, name: str) -> float:
    """Mean of a number over the last steps that have it; NaN if none has."""
    values = [value for value in run.metrics.columns[name][-_RECENT:] if math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def sections(runs: Sequence[Run], names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Titles and the charts under them; a chart for which no run has numbers is an empty text."""
    several = len(runs) > 1
    smoothing = "the mean of about " + ("a fiftieth of the" if several else f"{span(runs[0].metrics):,.0f}") + " steps"
    yield (
        "Loss",
        [
            line_chart("Loss", _noisy(runs, names, "loss"), log=True, note=f"pale: each step; strong: {smoothing}"),
            line_chart("Held-out loss", _held_out(runs, names), log=True),
            *_by_sigma(runs, names, smoothing),
            *_held_out_by_sigma(runs, names),
        ],
    )
    yield (
        "Optimizer",
        [
            line_chart("Gradient norm", _noisy(runs, names, "grad_norm"), unit="before clipping", log=True),
            line_chart("Learning rate", _plain(runs, names, "learning_rate"), from_zero=True),
        ],
    )
    yield (
        "Speed and memory",
        [
            _time_of_runs(runs, names) if several else _time_of_steps(runs[0]),
            line_chart("Samples", _noisy(runs, names, "samples_per_second"), unit="1/s", from_zero=True),
            line_chart("Tokens", _noisy(runs, names, "tokens_per_second"), unit="1/s", from_zero=True),
            line_chart(
                "Model FLOPs utilisation",
                _noisy(runs, names, "mfu", scale=lambda value: 100 * value),
                unit="% of the device's peak",
                from_zero=True,
            ),
            line_chart("Communication", _noisy(runs, names, "seconds_communication"), unit="s a step", from_zero=True),
            _memory(runs, names),
        ],
    )


def _columns(runs: Sequence[Run], name: str) -> Iterator[tuple[int, Run, Sequence[float]]]:
    """The runs that have the number, with their place."""
    for place, run in enumerate(runs):
        if run.metrics.has(name):
            yield place, run, run.metrics.columns[name]


def _label(names: Sequence[str], place: int, name: str) -> str:
    """A run's name, where there are several."""
    return names[place] if len(names) > 1 else _NAMES.get(name, name.replace("_", " "))


def _plain(runs: Sequence[Run], names: Sequence[str], name: str, scale: Callable[[float], float] = float) -> list[Line]:
    return [
        Line(_label(names, place, name), thin(run.metrics.steps, list(map(scale, values))), place)
        for place, run, values in _columns(runs, name)
    ]


def _noisy(runs: Sequence[Run], names: Sequence[str], name: str, scale: Callable[[float], float] = float) -> list[Line]:
    """Each step, and their mean on top of all."""
    raw, strong = [], []
    for place, run, column in _columns(runs, name):
        values = list(map(scale, column))
        label = _label(names, place, name)
        raw.append(Line(f"{label}, each step", thin(run.metrics.steps, values), place, faint=True))
        strong.append(Line(label, thin(run.metrics.steps, smooth(values, span(run.metrics))), place))
    return raw + strong


def _part(index: int) -> str:
    return f"sigma {index / QUARTILES:g} to {(index + 1) / QUARTILES:g}"


def _by_sigma(runs: Sequence[Run], names: Sequence[str], smoothing: str) -> Iterator[str]:
    """All quarters of sigma of one run in a chart; of several runs a chart for each."""

    def points(run: Run, index: int) -> Points:
        # A step that drew no sigma of that quarter says nothing of it, so the line goes on over it.
        steps, values = present(run.metrics.steps, run.metrics.columns[quartile(index)])
        return thin(steps, smooth(values, span_of(len(values))))

    title = "Loss by noise level"
    if len(runs) == 1:
        lines = [Line(_part(index), points(run, index), index) for index in range(QUARTILES) for run in runs]
        yield line_chart(title, lines, log=True, note=f"each {smoothing} that drew such a sigma")
        return
    for index in range(QUARTILES):
        found = _columns(runs, quartile(index))
        lines = [Line(names[place], points(run, index), place) for place, run, _ in found]
        yield line_chart(f"{title}: {_part(index)}", lines, log=True)


def _held_out(runs: Sequence[Run], names: Sequence[str]) -> list[Line]:
    return [
        Line(_label(names, place, "loss"), _held_out_points(run, "loss"), place, marks=True)
        for place, run in enumerate(runs)
        if len(run.validation)
    ]


def _held_out_points(run: Run, name: str) -> Points:
    return thin(*present(run.validation.steps, run.validation.columns[name]))


def _held_out_by_sigma(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    title = "Held-out loss by noise level"
    if len(runs) == 1:
        lines = [
            Line(_part(index), _held_out_points(runs[0], quartile(index)), index, marks=True)
            for index in range(QUARTILES)
        ]
        yield line_chart(title, lines, log=True)
        return
    for index in range(QUARTILES):
        lines = [
            Line(names[place], _held_out_points(run, quartile(index)), place, marks=True)
            for place, run in enumerate(runs)
            if len(run.validation)
        ]
        yield line_chart(f"{title}: {_part(index)}", lines, log=True)


def _time_of_steps(run: Run) -> str:
    columns = [run.metrics.columns[f"seconds_{part}"] for part in _PARTS]
    steps, averaged = means(run.metrics.steps, columns)
    return area_chart("Time of a step", steps, list(zip(_PARTS, averaged, strict=True)), unit="s")


def _time_of_runs(runs: Sequence[Run], names: Sequence[str]) -> str:
    rows = []
    for run, name in zip(runs, names, strict=True):
        _, averaged = means(run.metrics.steps, [run.metrics.columns[f"seconds_{part}"] for part in _PARTS], 1)
        if averaged[0]:
            rows.append((name, [values[0] for values in averaged]))
    return stacked_bars("Time of a step, mean of the run", rows, _PARTS, unit="s")


def _memory(runs: Sequence[Run], names: Sequence[str]) -> str:
    largest = max(
        (run.metrics.last("memory_peak_bytes") for _, run, _ in _columns(runs, "memory_peak_bytes")), default=0
    )
    unit, factor = _unit(largest)
    lines = _plain(runs, names, "memory_peak_bytes", lambda value: value / factor)
    return line_chart("Peak memory so far", lines, unit=unit, from_zero=True)


def _unit(size_in_bytes: float) -> tuple[str, float]:
    return next(
        ((unit, factor) for unit, factor in (("GiB", 2.0**30), ("MiB", 2.0**20)) if size_in_bytes >= factor),
        ("KiB", 2.0**10),
    )


def size(number: float) -> str:
    """Bytes as a person would write them."""
    unit, factor = _unit(number)
    return f"{number / factor:.4g} {unit}"


def duration(seconds: float) -> str:
    """Seconds as a person would write them."""
    if not math.isfinite(seconds):
        return "an unknown time"
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
