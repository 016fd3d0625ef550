"""`flowshard check`: everything that is wrong with a config and its data, without weights and without a device."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from flowshard.config import Config, DataConfig
from flowshard.config_conflicts import from_cache
from flowshard.config_file import load_config
from flowshard.data.cached_sets import find_set
from flowshard.data.metadata import Metadata
from flowshard.data.problems import DataError
from flowshard.data.sheet import write_sheet
from flowshard.data.sizes import check_budget, row_size, run_size, with_sizes
from flowshard.data.sources import read_data
from flowshard.data.survey import Surveyed, survey
from flowshard.errors import UserError
from flowshard.families import Family, Variant
from flowshard.parallel.layout import Layout, check_heads, first_process, resolve_layout
from flowshard.train.data_inputs import check_batches, input_shapes, only_legal
from flowshard.train.inputs import check_inputs, count_steps, with_variant
from flowshard.weights.files import TRANSFORMER_FOLDER, read_json
from flowshard.weights.source import OwnFiles, find_source

_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt")
_SHOWN, _ON_SHEET = 10, 100
"""Rows of a kind of problem that the report lists, and samples on a sheet."""
T = TypeVar("T")


@dataclass
class CheckReport:
    """What a check found."""

    config: str
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[DataError] = field(default_factory=list)
    """Training would fail with these."""
    warnings: list[DataError] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "config": self.config,
            "ok": not self.problems,
            "facts": self.facts,
            "problems": [_as_json(problem) for problem in self.problems],
            "warnings": [_as_json(warning) for warning in self.warnings],
            "not_checked": self.not_checked,
        }

    def as_text(self) -> str:
        """For people: facts, then problems and warnings by kind with the first rows of each."""
        lines = [f"{'config':<12} {self.config}"]
        lines += [f"{name.replace('_', ' '):<12} {_shown(value)}" for name, value in self.facts.items()]
        lines += [f"{'not checked':<12} {line}" for line in self.not_checked]
        for title, found in (("problems", self.problems), ("warnings", self.warnings)):
            lines.append(f"{title:<12} {len(found) or 'none'}")
            for kind, count in Counter(one.kind for one in found).items():
                alike = [one for one in found if one.kind == kind]
                lines.append(f"  {kind}: {count}")
                lines += [f"    {line}" for one in alike[:_SHOWN] for line in one.short.splitlines()]
                lines += [f"    and {count - _SHOWN} more"] if count > _SHOWN else []
        return "\n".join(lines)


def _as_json(one: DataError) -> dict[str, Any]:
    source = None if one.source is None else str(one.source)
    return {"kind": one.kind, "source": source, "row": one.row, "message": one.short}


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def check(
    config_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    processes: int | None = None,
    workers: int | None = None,
    sheet: Path | None = None,
) -> CheckReport:
    """Check a config, its layout, its files, every row and every medium.

    Args:
        config_file: YAML file.
        overrides: `a.b=value`.
        processes: of the layout that is checked; the fewest that the layout needs if None.
        workers: threads that decode; the number of processors if None.
        sheet: PNG file for a contact sheet.

    Raises:
        UserError: the sheet cannot be written.
    """
    checker = _Checker(CheckReport(str(config_file)))
    config = checker.attempt("config", lambda: load_config(config_file, overrides))
    if config is None:
        return checker.report
    found = checker.find_model(config)
    if found is None:
        checker.report.not_checked.append("layout and data, as the model is not known")
        return checker.report
    config, family, variant = found
    checker.check_model(config, family, variant, processes)
    samples = checker.check_data(config, family, workers or os.cpu_count() or 1, _ON_SHEET if sheet else 0)
    if checker.complete and not checker.report.problems:
        environment = _environment(config, processes)
        checker.attempt("run", lambda: check_inputs(config, environment))
    if sheet is not None:
        write_sheet(sheet, samples)
    return checker.report


def _environment(config: Config, processes: int | None) -> dict[str, str]:
    """What a launcher would set in the first of so many processes."""
    shard = config.layout.shard
    count = processes or max(config.layout.sequence, shard if isinstance(shard, int) else 1)
    return first_process(count, count)


class _Checker:
    """Fills a report."""

    def __init__(self, report: CheckReport) -> None:
        self.report = report
        self.complete = True
        """Whether the model's files are there, so that a run's own check can have the last word."""
        self.legal_size = True

    def attempt(self, kind: str, work: Callable[[], T]) -> T | None:
        """Do a part of the check; None if it finds a problem."""
        try:
            return work()
        except DataError as error:
            self.report.problems.append(error)
        except UserError as error:
            self.report.problems.append(DataError(kind, str(error)))
        return None

    def find_model(self, config: Config) -> tuple[Config, Family, Variant] | None:
        """The config with its variant, which may have to be recognised."""
        if config.model.variant is None and not _exists(config.model.path):
            self.report.problems.append(
                DataError(
                    "model", f"model.variant: {config.model.path} is not here to be recognised; set model.variant"
                )
            )
            return None

        return self.attempt("model", lambda: with_variant(config))

    def check_model(self, config: Config, family: Family, variant: Variant, processes: int | None) -> None:
        """Size, layout and the model's files."""
        facts, data = self.report.facts, config.data
        facts["model"] = variant.name
        before = len(self.report.problems)
        self.attempt("config", lambda: _check_size(data, family))
        self.legal_size = len(self.report.problems) == before
        layout = self.attempt("layout", lambda: resolve_layout(config, _environment(config, processes)))
        if layout is not None:
            facts["layout"] = layout.text
        if not _exists(config.model.path):
            self._leave_out(f"model.path: {config.model.path} is not on this machine, so its weights and LoRA targets")
        elif not _has_weights(config.model.path):
            self._leave_out(f"model.path: {config.model.path} holds no weights yet, so these and LoRA targets")
            settings = Path(str(config.model.path), TRANSFORMER_FOLDER, "config.json")
            if layout is not None and settings.is_file():
                self.attempt("layout", lambda: _check_heads(layout, family, variant, settings))
        else:
            self.attempt(
                "model",
                lambda: find_source(
                    config.model.path,
                    family,
                    variant,
                    option="model.path",
                    expert=config.model.expert,
                    encoders=not from_cache(data),
                    own=OwnFiles.of(config.model),
                ),
            )

    def _leave_out(self, what: str) -> None:
        self.complete = False
        self.report.not_checked.append(what)

    def check_data(self, config: Config, family: Family, workers: int, previews: int) -> list[Surveyed]:
        """Every row and every medium."""
        report, data = self.report, config.data
        if from_cache(data):
            self._describe_set(config, family)
            return []
        noted: list[DataError] = []
        metadata = self.attempt("data", lambda: read_data(data, family.inputs, note=noted.append))
        if metadata is None:
            report.problems += noted
            return []
        if self.legal_size:
            metadata = only_legal(config, family, metadata, noted.append)
            metadata = with_sizes(metadata, data, family, keep_bad=True)
        report.warnings += [DataError("metadata", line) for line in metadata.notes]
        samples = survey(
            metadata.rows,
            data,
            family,
            seed=config.seed,
            workers=workers,
            previews=previews,
            progress=_progress,
        )
        errors = [problem for problem in noted if problem.row is not None]
        total = len(metadata.rows) + len(errors)
        errors += [sample.error for sample in samples if sample.error is not None]
        report.problems += [problem for problem in noted if problem.row is None]
        skipped = data.on_error == "skip" and len(errors) <= min(data.max_skipped, total - 1)
        (report.warnings if skipped else report.problems).extend(errors)
        if samples and not any(sample.error for sample in samples):
            self.attempt("batch", lambda: check_batches(config, family, metadata))
        if not metadata.rows and not report.problems:
            report.problems.append(DataError("metadata", f"{metadata.label}: holds no samples"))
        decoded = [sample for sample in samples if sample.error is None]
        self._count(config, family, metadata, decoded)
        self._warn(decoded, config, family)
        return samples

    def _describe_set(self, config: Config, family: Family) -> None:
        """What is known of samples that are in a cache."""
        found = self.attempt("data", lambda: find_set(config, family))
        if found is not None:
            self.report.facts["data"] = f"{found[1].name} in {config.data.cache}, of {found[1].label}"
            self._count_steps(config, found[1].metadata())
            self.report.not_checked.append("media, as they are encoded already")

    def _count(self, config: Config, family: Family, metadata: Metadata, decoded: Sequence[Surveyed]) -> None:
        facts, data = self.report.facts, config.data
        facts["data"] = metadata.label
        facts["rows"] = len(metadata.rows)
        facts["clips"] = sum(not row.is_picture for row in metadata.rows)
        facts["pictures"] = sum(row.is_picture for row in metadata.rows)
        facts["sizes"] = _histogram(f"{sample.size[0]}x{sample.size[1]}" for sample in decoded)
        facts["frames"] = _histogram(
            f"{sample.frames}" + (f" at {sample.fps:.4g} fps" if sample.fps else "")
            for sample in decoded
            if not sample.row.is_picture
        )
        facts["frames_used"] = _histogram(str(sample.used) for sample in decoded)
        if self.legal_size:
            facts["tokens"] = _histogram(
                f"{family.token_count(*row_size(sample.row, data, family), sample.used):,}" for sample in decoded
            )
            self._bucket(config, family, metadata, decoded)
        self._count_steps(config, metadata)

    def _bucket(self, config: Config, family: Family, metadata: Metadata, decoded: Sequence[Surveyed]) -> None:
        """How many samples of an epoch there are of each shape."""
        data = config.data
        shapes: dict[int, str] = {}
        for sample in decoded:
            height, width = row_size(sample.row, data, family)
            given = [one for one in family.inputs if one.column in sample.row.inputs]
            parts = [f"{sample.used} frames"] if sample.used > 1 else []
            parts += [f"{column} {w}x{h}" for column, h, w in input_shapes(family, sample.row)]
            parts += [one.column for one in given if one.kind != "images"]
            shapes[id(sample.row)] = ", ".join([f"{width}x{height}", *parts])
        places = [shapes[id(row)] for place in metadata.epoch if id(row := metadata.rows[place]) in shapes]
        counts = {shape: count * data.repeat for shape, count in Counter(places).most_common()}
        if len(counts) < 2:
            return
        self.report.facts["shapes"] = counts
        batch = config.train.global_batch
        if data.buckets == "auto":
            self.report.warnings += [
                DataError(
                    "thin bucket", f"{shape}: {count} samples, fewer than a step's {batch}: each step uses them again"
                )
                for shape, count in counts.items()
                if count < batch
            ]

    def _count_steps(self, config: Config, metadata: Metadata) -> None:
        facts, batch = self.report.facts, config.train.global_batch
        samples = len(metadata.epoch) * config.data.repeat
        facts["samples"] = samples
        facts["epoch"] = f"{samples / batch:.4g} steps of {batch} samples"
        if samples:
            steps = count_steps(config, samples)
            facts["steps"] = steps
            facts["epochs"] = steps * batch / samples

    def _warn(self, decoded: Sequence[Surveyed], config: Config, family: Family) -> None:
        warn = self.report.warnings
        for sample in decoded:
            height, width = row_size(sample.row, config.data, family)
            if sample.size[0] < width or sample.size[1] < height:
                found = f"{sample.size[0]}x{sample.size[1]} is enlarged to {width}x{height}"
                warn.append(_of_row("small medium", sample, found))
            if any(not prompt.strip() for prompt in sample.row.prompts):
                warn.append(_of_row("empty caption", sample, "its caption is empty"))
        first: dict[object, Surveyed] = {}
        for sample in decoded:
            row = sample.row
            part = (sample.digest, row.start, row.end)
            same = first.setdefault((part, row.prompts, *row.inputs.items()), sample)
            if same is not sample:
                warn.append(_of_row("same medium and caption", sample, f"as {_place(same)}"))
                continue
            same = first.setdefault(part, sample)
            if same is not sample:
                warn.append(_of_row("same medium", sample, f"as {_place(same)}, with another caption"))


def _check_size(data: DataConfig, family: Family) -> None:
    check_budget(data, family)
    if data.height is not None or data.max_pixels is not None:  # else a set in a cache says it
        family.check_size(*run_size(data, family), data.frames, where="data.")


def _check_heads(layout: Layout, family: Family, variant: Variant, settings: Path) -> None:
    check_heads(layout, read_json(settings).get(family.heads_setting, variant.heads))


def _of_row(kind: str, sample: Surveyed, what: str) -> DataError:
    return DataError(kind, f"{sample.row.describe()}: {what}", source=sample.row.source, row=sample.row.number)


def _place(sample: Surveyed) -> str:
    return f"{sample.row.source}, row {sample.row.number}"


def _histogram(values: Iterable[str]) -> dict[str, int]:
    """The most frequent first."""
    return dict(Counter(values).most_common())


def _progress(work: Iterable[Surveyed], count: int) -> Iterable[Surveyed]:
    return tqdm(work, total=count, desc="decode", unit="medium", file=sys.stderr)


def _paths(path: str | list[str]) -> list[str]:
    return [path] if isinstance(path, str) else path


def _exists(path: str | list[str]) -> bool:
    """Whether all of it is on this machine."""
    return all(Path(one).exists() or bool(glob(one)) for one in _paths(path))  # noqa: PTH207


def _has_weights(path: str | list[str]) -> bool:
    found = [Path(one) for pattern in _paths(path) for one in [pattern, *glob(pattern)]]  # noqa: PTH207
    return any(file.suffix in _WEIGHTS for one in found for file in (one.rglob("*") if one.is_dir() else [one]))
