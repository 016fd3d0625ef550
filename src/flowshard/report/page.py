"""Puts the page together. All text that comes from files is escaped here or in `charts` and `media`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import yaml

from flowshard import __version__
from flowshard.report import figures, media
from flowshard.report.charts import short
from flowshard.report.data import Run
from flowshard.report.style import SCRIPT, STYLE
from flowshard.train.sample_files import spread

_MOST_SAMPLES = 96
"""Samples in a page."""
_LEAST_STEPS = 4
"""Steps whose samples are shown at least; if that makes too many, prompts are left out."""


def page(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The page of one run, or of several in the same charts.

    Args:
        runs: at least one.
        names: what each is called.
    """
    title = " · ".join(names)
    head = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="about">Flowshard {__version__} report, {time.strftime("%Y-%m-%d %H:%M")}</p>',
        _tiles(runs[0]) if len(runs) == 1 else _overview(runs, names),
    ]
    body = [*head, *_charts(runs, names), *_samples(runs, names)]
    if len(runs) > 1:
        body.append(_differences(runs, names))
    for run, name in zip(runs, names, strict=True):
        body.append(_files(run, name if len(runs) > 1 else None))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} - Flowshard</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _progress(run: Run) -> str:
    """How many steps are done, of how many."""
    if run.planned is None:
        return f"{run.done:,} steps"
    return f"{run.done:,} of {run.planned:,} steps"


def _facts(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and remark of what is said of a run at a glance."""
    metrics = run.metrics
    if not len(metrics):
        return [("steps", _progress(run), "no step has been made yet")]
    facts = [("steps", _progress(run), _remaining(run))]
    facts.append(("loss", short(figures.smoothed_loss(run)[-1]), "smoothed"))
    if len(run.validation):
        facts.append(("held-out loss", short(run.validation.last("loss")), f"step {run.validation.steps[-1]:,.0f}"))
    facts.append(("a step", f"{short(figures.recent(run, 'seconds'))} s", "mean of the last 50"))
    rate = figures.recent(run, "tokens_per_second")
    facts.append(
        ("throughput", f"{short(rate)} tokens/s", f"{short(figures.recent(run, 'samples_per_second'))} samples/s")
    )
    if metrics.has("mfu"):
        facts.append(("MFU", f"{100 * figures.recent(run, 'mfu'):.1f} %", "of the device's peak"))
    if metrics.has("memory_peak_bytes"):
        rank = metrics.last("memory_peak_rank")
        where = f"on rank {rank:.0f}" if rank == rank else ""
        facts.append(("peak memory", figures.size(metrics.last("memory_peak_bytes")), where))
    if metrics.last("skipped_updates") > 0:
        facts.append(("updates left out", f"{metrics.last('skipped_updates'):.0f}", "their gradient overflowed"))
    return facts


def _remaining(run: Run) -> str:
    if run.planned is None or run.done >= run.planned:
        return "done" if run.planned is not None else ""
    seconds = (run.planned - run.done) * figures.recent(run, "seconds")
    return f"{figures.duration(seconds)} more at this speed"


def _tiles(run: Run) -> str:
    tiles = []
    for name, value, remark in _facts(run):
        bar = ""
        if name == "steps" and run.planned:
            bar = f'<div class="progress"><i style="width:{min(100 * run.done / run.planned, 100):.1f}%"></i></div>'
        small = f"<small>{escape(remark)}</small>" if remark else ""
        tiles.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd>{bar}</div>")
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _overview(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The same facts of several runs as a table."""
    facts = [{name: value for name, value, _ in _facts(run)} for run in runs]
    columns = list(dict.fromkeys(name for one in facts for name in one))
    return "<h2>Runs</h2>" + _table(
        ["run", *columns],
        [[name, *(one.get(column, "") for column in columns)] for name, one in zip(names, facts, strict=True)],
    )


def _charts(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    for title, drawn in figures.sections(runs, names):
        present = [chart for chart in drawn if chart]
        if present:
            yield f'<h2>{escape(title)}</h2><div class="charts">{"".join(present)}</div>'


def _samples(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    parts = []
    with_samples = [(run, name) for run, name in zip(runs, names, strict=True) if run.samples]
    for run, name in with_samples:
        room = _MOST_SAMPLES // len(with_samples)
        prompts = sorted({index for files in run.samples.values() for index in files})
        shown = prompts[: max(room // _LEAST_STEPS, 1)]
        steps = spread(sorted(run.samples), max(room // len(shown), 2))
        files = [run.samples[step][index] for step in steps for index in shown if index in run.samples[step]]
        clips = media.as_clips(files)
        if len(runs) > 1:
            parts.append(f"<h3>{escape(name)}</h3>")
        for index in shown:
            strip = [
                f"<figure>{media.element(run.samples[step][index], f'step {step}', clips=clips)}"
                f"<figcaption>step {step:,}</figcaption></figure>"
                for step in steps
                if index in run.samples[step]
            ]
            parts.append(f'<p class="prompt">{escape(run.prompt(index))}</p><div class="strip">{"".join(strip)}</div>')
        if clips and any(file.suffix == ".mp4" for file in files):
            parts.append('<p class="note">Clips play at a click.</p>')
        left = []
        if len(steps) < len(run.samples):
            left.append(f"{len(steps)} of {len(run.samples)} steps")
        if len(shown) < len(prompts):
            left.append(f"{len(shown)} of {len(prompts)} prompts")
        if left:
            parts.append(f'<p class="note">Shown are {" and ".join(left)}.</p>')
    if parts:
        yield "<h2>Samples</h2>" + "".join(parts)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "null" if value is None else str(value)


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    kept = ("layout", "versions", "machine", "git")
    records = [{key: run.record[key] for key in kept if key in run.record} for run in runs]
    flat = [dict(_flat({**run.config, "record": record})) for run, record in zip(runs, records, strict=True)]
    options = dict.fromkeys(key for one in flat for key in one)
    rows = [[option, *(one.get(option, "") for one in flat)] for option in options]
    different = [row for row in rows if len(set(row[1:])) > 1]
    if not different:
        return "<h2>Differences</h2><p>All options are equal.</p>"
    return "<h2>Differences</h2>" + _table(["option", *names], different)


def _files(run: Run, name: str | None) -> str:
    """Config, layout, environment and checkpoints."""
    record = run.record
    layout = record.get("layout")
    rest = {key: value for key, value in record.items() if key not in ("layout", "steps")}
    parts = [
        f"<h2>{escape(name or 'Run')}</h2>",
        f'<p class="about">{escape(str(run.path.absolute()))}</p>',
        _details(
            "Config", f"<pre>{escape(yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True))}</pre>"
        ),
    ]
    if isinstance(layout, Mapping):
        parts.append(_details("Layout", _table([], [list(row) for row in _flat(layout)])))
    if rest:
        parts.append(_details("Environment", _table([], [list(row) for row in _flat(rest)])))
    checkpoints = [[f"{step:,}", figures.size(size)] for step, size in run.checkpoints.items()]
    if checkpoints:
        parts.append(_details("Checkpoints", _table(["step", "size"], checkpoints)))
    return "".join(parts)


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; without a head the first column says what a row is."""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    lines = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f'<div class="scroll"><table>{top}<tbody>{lines}</tbody></table></div>'
