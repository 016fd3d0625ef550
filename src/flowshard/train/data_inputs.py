"""Checks the samples of a run against its model, before torch is imported."""

from collections.abc import Callable
from dataclasses import replace

from flowshard.config import Config
from flowshard.config_conflicts import check_conflicts, from_cache
from flowshard.data.cached_sets import find_set
from flowshard.data.held_out import hold_out
from flowshard.data.media import picture_size
from flowshard.data.metadata import Metadata, Row, without
from flowshard.data.problems import DataError, Note
from flowshard.data.sizes import check_budget, run_size, with_sizes
from flowshard.data.sources import RunData, read_data, read_validation
from flowshard.errors import UserError
from flowshard.families import Family, Variant


def read_samples(config: Config, family: Family) -> tuple[Config, RunData]:
    """The samples that are trained on and those that are held out; the model takes each at its size.

    Returns:
        The samples, and the config, to which samples that were encoded before bring the options that they were encoded with.

    Raises:
        UserError: naming the option, or file and row.
    """
    if from_cache(config.data):
        config, found = find_set(config, family)
        check_conflicts(config)  # with what the set brings
        everything = found.metadata()
    else:
        check_budget(config.data, family)
        everything = _usable(config, family, lambda note: read_data(config.data, family.inputs, note=note))
    data, validation = config.data, config.validation
    family.check_size(*run_size(data, family), data.frames, where="data.")
    if data.tiles is not None:
        family.check_tiles(data.tiles, option="data.tiles")
    training, held_out = everything, None
    if validation.fraction is not None:
        training, held_out = hold_out(everything, validation.fraction, seed=config.seed)
    elif (file := validation.metadata) is not None:
        held_out = _usable(config, family, lambda note: read_validation(file, data, family.inputs, note=note))
    return config, RunData(everything, training, held_out)


def _usable(config: Config, family: Family, read: Callable[[Note], Metadata]) -> Metadata:
    """The rows that the model can take; what is wrong with others ends the run unless they are to be skipped."""
    data = config.data
    left_out: list[str] = []

    def note(problem: DataError) -> None:
        if data.on_error == "stop" or problem.row is None:
            raise problem
        left_out.append(problem.short)

    metadata = only_legal(config, family, read(note), note)
    if not metadata.rows and left_out:
        raise UserError(f"{metadata.label}: no row can be used; the first: {left_out[0]}")
    metadata = with_sizes(metadata, data, family, keep_bad=data.on_error == "skip")
    return replace(metadata, left_out=tuple(left_out))


def only_legal(config: Config, family: Family, metadata: Metadata, note: Note) -> Metadata:
    """The rows that the model can take by their size and inputs.

    Args:
        config: of the run.
        family: of the model.
        metadata: the samples.
        note: is told of the others, which are left out if it returns.
    """
    data, bad = config.data, set()
    for place, row in enumerate(metadata.rows):
        where = f"{row.source}: row {row.number}: "
        try:
            if row.is_picture and data.max_pixels is None:
                family.check_size(*run_size(data, family), 1, where=f"{where}{row.media.name} is a picture: ")
            family.check_given(row.inputs.keys(), where=where)
        except UserError as error:
            note(DataError("row", str(error), source=row.source, row=row.number))
            bad.add(place)
    return without(metadata, bad)


def check_input_dropout(config: Config, family: Family, variant: Variant, metadata: Metadata) -> None:
    """Refuse to leave out inputs where there are none, or where the model needs them.

    Raises:
        UserError: naming the option.
    """
    rate = config.data.input_dropout
    if not rate:
        return
    if not family.optional_conditions:
        why = "needs its inputs" if family.inputs else "has no inputs besides the prompt"
        raise UserError(f"data.input_dropout: {rate:g}, but {variant.name} {why}; set data.input_dropout=0")
    if not any(one.column in row.inputs or one.from_clip for row in metadata.rows for one in family.inputs):
        columns = ", ".join(one.column for one in family.inputs)
        raise UserError(
            f"data.input_dropout: {rate:g}, but no row of {metadata.label} has {columns}; add the column, or set "
            "data.input_dropout=0"
        )
    if config.train.micro_batch > 1:
        raise UserError(
            f"train.micro_batch: {config.train.micro_batch} samples of one shape are needed, but data.input_dropout leaves "
            "out the inputs of some; use train.micro_batch=1 or data.input_dropout=0"
        )


def check_batches(config: Config, family: Family, metadata: Metadata) -> None:
    """Refuse samples that a micro-batch cannot hold together, as they may have other shapes.

    Raises:
        UserError: naming two rows that differ.
    """
    if config.train.micro_batch == 1 or config.data.buckets == "auto" or from_cache(config.data):
        return  # the shapes of what is in a cache are known when it is opened
    needed = f"train.micro_batch: {config.train.micro_batch} samples of one shape are needed, but"
    fix = "use data.buckets=auto, with which every step has samples of one shape, or train.micro_batch=1"
    pictures = [row for row in metadata.rows if row.is_picture]
    mixed = config.data.frames > 1 and 0 < len(pictures) < len(metadata.rows)
    if mixed:
        raise UserError(
            f"{needed} {metadata.label} mixes clips of {config.data.frames} frames with pictures (row {pictures[0].number}: "
            f"{pictures[0].media}); {fix}, or data.frames=1"
        )
    first = metadata.rows[0]
    other = next((row for row in metadata.rows if row.size != first.size), None)
    if other is not None:
        sizes = [_size_shown(row) for row in (first, other)]
        raise UserError(
            f"{needed} with data.max_pixels row {first.number} of {metadata.label} has {sizes[0]} and row {other.number} "
            f"{sizes[1]}; {fix}, or data.height and data.width"
        )
    shapes = input_shapes(family, first)
    for row in metadata.rows[1:]:
        others = input_shapes(family, row)
        if others != shapes:
            raise UserError(
                f"{needed} in {metadata.label} pictures differ: row {first.number} has {_shown(shapes)}, row {row.number} "
                f"{_shown(others)}; {fix}, or pictures alike in number and aspect ratio"
            )
        given = [{one.column for one in family.inputs if one.column in each.inputs} for each in (first, row)]
        if given[0] != given[1]:
            names = [", ".join(sorted(columns)) or "none" for columns in given]
            raise UserError(
                f"{needed} in {metadata.label} the inputs differ: row {first.number} has {names[0]}, row {row.number} "
                f"{names[1]}; {fix}"
            )


def _size_shown(row: Row) -> str:
    return "no size" if row.size is None else f"{row.size[1]}x{row.size[0]}"


def input_shapes(family: Family, row: Row) -> list[tuple[str, int, int]]:
    """Column, height and width of the pictures of any size that a row gives the model."""
    columns = [one.column for one in family.inputs if one.kind == "images"]
    found = []
    for column in columns:
        where = f"{row.describe()}, {column}"
        for file in row.inputs.get(column, ()):
            try:
                found.append((column, *family.input_shape(picture_size(file, where=where))))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
    return found


def _shown(shapes: list[tuple[str, int, int]]) -> str:
    return ", ".join(f"{column} {width}x{height}" for column, height, width in shapes) or "none"
