"""Checks the files that a user gives a model besides a prompt. Needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flowshard.data.media import picture_size
from flowshard.errors import UserError
from flowshard.families.base import Family
from flowshard.families.variant import Variant


def check_files(
    files: Mapping[str, Sequence[Path]], family: Family, variant: Variant, *, place: Callable[[str], str], where: str
) -> None:
    """Refuse files that a model cannot take, or without which it cannot do.

    Args:
        files: by column.
        family: of the model.
        variant: the model.
        place: how messages name the option for a column.
        where: begins messages about several of them.

    Raises:
        UserError: naming the option, the file and the fix.
    """
    known = {one.column: one for one in family.inputs}
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    for column, given in files.items():
        if column not in known:
            raise UserError(f"{place(column)}: no input of {variant.name}; {takes}")
        for file in given:
            if not file.is_file():
                raise UserError(f"{place(column)}: the file {file} does not exist")
        if len(given) > 1 and not known[column].several:
            raise UserError(f"{place(column)}: {variant.name} takes one file")
        if known[column].kind == "images":
            for file in given:
                try:
                    family.input_shape(picture_size(file, where=place(column)))
                except UserError as error:
                    raise UserError(f"{place(column)}: {file}: {error}") from None
    for column, one in known.items():
        if one.required and not files.get(column):
            raise UserError(f"{place(column)}: {variant.name} needs it; give a file")
    family.check_given(files.keys(), where=where)
