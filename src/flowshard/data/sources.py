"""One list of samples from one metadata file or several, and what an epoch of it is. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from flowshard.config import DataConfig, SourceConfig
from flowshard.data.metadata import Metadata, read_metadata
from flowshard.data.problems import DataError, Note, stop
from flowshard.families.variant import Input

LONGEST_EPOCH = 100_000_000
"""Samples of an epoch; weights that are further apart are a mistake."""


@dataclass(frozen=True)
class RunData:
    """The samples of a run."""

    all: Metadata
    """Those of its metadata, or of the set in its cache."""
    training: Metadata
    """Those of them that are trained on."""
    held_out: Metadata | None
    """Samples that are never trained on."""


def read_data(data: DataConfig, inputs: Sequence[Input] = (), *, note: Note = stop) -> Metadata:
    """Read and check all metadata of a run.

    Args:
        data: of the config.
        inputs: what the model gets besides the prompt.
        note: is told of every problem; rows with one are left out if it returns.

    Raises:
        UserError: as `read_metadata`, or the weights of the sources make no epoch.
    """
    if data.metadata is not None:
        return _read(data.metadata, data.root, inputs, data, note)
    parts: list[Metadata] = []
    for number, source in enumerate(data.sources):
        option = f"data.sources.{number}"
        named = _naming(note, {"data.metadata": f"{option}.metadata", "data.root": f"{option}.root"})
        parts.append(_read(source.metadata, source.root, inputs, data, named))
    first = [0]
    for part in parts:
        first.append(first[-1] + len(part.rows))
    counts = samples_of_sources([len(part.rows) for part in parts], data.sources)
    epoch = [
        first[number] + place
        for number, (part, count) in enumerate(zip(parts, counts, strict=True))
        for place in spread(len(part.rows), count)
    ]
    return Metadata(
        label=", ".join(part.label for part in parts),
        rows=tuple(row for part in parts for row in part.rows),
        notes=tuple(line for part in parts for line in part.notes),
        epoch=epoch,
    )


def read_validation(path: str, data: DataConfig, inputs: Sequence[Input] = (), *, note: Note = stop) -> Metadata:
    """Read and check the metadata of `validation.metadata`; paths start from `data.root` as in the training data.

    Raises:
        UserError: as `read_metadata`.
    """
    named = _naming(note, {"data.metadata": "validation.metadata"})
    return _read(path, data.root, inputs, data, named)


def _naming(note: Note, options: Mapping[str, str]) -> Note:
    """Tells of problems with other names of options."""

    def named(problem: DataError) -> None:
        text = str(problem)
        for name, other in options.items():
            text = text.replace(name, other)
        note(DataError(problem.kind, text, source=problem.source, row=problem.row, short=problem.short))

    return named


def _read(path: str, root: str | None, inputs: Sequence[Input], data: DataConfig, note: Note) -> Metadata:
    """One file; without rows if nothing can be read and `note` returns."""
    try:
        return read_metadata(path, root, inputs, prefix=data.caption_prefix, only=data.columns, note=note)
    except DataError as problem:
        note(problem)
        return Metadata(path, (), (), range(0))


def samples_of_sources(rows: Sequence[int], sources: Sequence[SourceConfig]) -> list[int]:
    """How many samples of an epoch come from each source.

    Without weights every source gives its rows `repeat` times. With weights the shares of the sources are in proportion
    to them, in the shortest epoch that still holds every row `repeat` times; shares are rounded to whole samples by the
    method of the largest remainder.

    Raises:
        DataError: only some sources have a weight, or the weights are too far apart.
    """
    least = [count * source.repeat for count, source in zip(rows, sources, strict=True)]
    given = [source.weight for source in sources if source.weight is not None]
    if not given:
        return least
    if len(given) < len(sources):
        without = next(number for number, source in enumerate(sources) if source.weight is None)
        raise DataError("config", f"data.sources.{without}.weight: give all sources a weight, or none")
    weights = [Fraction(str(weight)) for weight in given]
    shares = [weight / sum(weights) for weight in weights]
    size = max(-(-count // share) for count, share in zip(least, shares, strict=True))
    if size > LONGEST_EPOCH:
        raise DataError(
            "config",
            f"data.sources: with weights {', '.join(f'{weight:g}' for weight in given)} an epoch that holds every row has "
            f"{size:,} samples, more than {LONGEST_EPOCH:,}; bring the weights closer together",
        )
    counts = [int(size * share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: (counts[number] - size * shares[number], number))
    for number in by_remainder[: size - sum(counts)]:
        counts[number] += 1
    return counts


def spread(rows: int, count: int) -> list[int]:
    """`count` samples of `rows` rows: each as often as any other, and those that come once more evenly spaced."""
    if not rows:
        return []
    rounds, more = divmod(count, rows)
    return list(range(rows)) * rounds + [number * rows // more for number in range(more)]
