"""Checks the samples of a run against its model, before torch is imported."""

from flowshard.config import Config
from flowshard.data.held_out import hold_out
from flowshard.data.media import picture_size
from flowshard.data.metadata import Metadata, Row
from flowshard.data.sources import read_data, read_validation
from flowshard.errors import UserError
from flowshard.families import Family, Variant


def read_samples(config: Config, family: Family) -> tuple[Metadata, Metadata | None]:
    """The samples that are trained on and those that are held out; the model takes each at the size of the run.

    Raises:
        UserError: naming the option, or file and row.
    """
    data, validation = config.data, config.validation
    family.check_size(data.height, data.width, data.frames, where="data.")
    if data.tiles is not None:
        family.check_tiles(data.tiles, option="data.tiles")
    metadata = read_data(data, family.inputs)
    held_out = None
    if validation.fraction is not None:
        metadata, held_out = hold_out(metadata, validation.fraction, seed=config.seed, root=data.root)
    elif validation.metadata is not None:
        held_out = read_validation(validation.metadata, data, family.inputs)
    for rows in filter(None, (metadata, held_out)):
        for row in rows.rows:
            check_row(config, family, row)
    return metadata, held_out


def check_row(config: Config, family: Family, row: Row) -> None:
    """Refuse a sample that the model cannot take.

    Raises:
        UserError: naming file and row.
    """
    data, where = config.data, f"{row.source}: row {row.number}: "
    if row.is_picture:
        family.check_size(data.height, data.width, 1, where=f"{where}{row.media.name} is a picture: ")
    family.check_given(row.inputs.keys(), where=where)


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
    if config.train.micro_batch == 1:
        return
    pictures = [row for row in metadata.rows if row.is_picture]
    mixed = config.data.frames > 1 and 0 < len(pictures) < len(metadata.rows)
    if mixed:
        raise UserError(
            f"train.micro_batch: {config.train.micro_batch} samples of one shape are needed, but {metadata.label} mixes "
            f"clips of {config.data.frames} frames with pictures (row {pictures[0].number}: {pictures[0].media}); use "
            "train.micro_batch=1 or data.frames=1"
        )

    first, shapes = metadata.rows[0], _input_shapes(family, metadata.rows[0])
    for row in metadata.rows[1:]:
        others = _input_shapes(family, row)
        if others != shapes:
            raise UserError(
                f"train.micro_batch: {config.train.micro_batch} samples of one shape are needed, but in {metadata.label} "
                f"pictures differ: row {first.number} has {_shown(shapes)}, row {row.number} {_shown(others)}; use "
                "train.micro_batch=1, or pictures alike in number and aspect ratio"
            )
        given = [{one.column for one in family.inputs if one.column in each.inputs} for each in (first, row)]
        if given[0] != given[1]:
            names = [", ".join(sorted(columns)) or "none" for columns in given]
            raise UserError(
                f"train.micro_batch: {config.train.micro_batch} samples of one shape are needed, but in {metadata.label} the "
                f"inputs differ: row {first.number} has {names[0]}, row {row.number} {names[1]}; use train.micro_batch=1"
            )


def _input_shapes(family: Family, row: Row) -> list[tuple[str, int, int]]:
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
