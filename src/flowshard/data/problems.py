"""What is wrong with the data, found one at a time by a run and all together by `flowshard check`. Needs no torch."""

from collections.abc import Callable
from pathlib import Path

from flowshard.errors import UserError


class DataError(UserError):
    """Something wrong with a metadata file, a row or a medium."""

    def __init__(
        self, kind: str, message: str, *, source: Path | None = None, row: int | None = None, short: str | None = None
    ) -> None:
        """An error at a place.

        Args:
            kind: groups problems that are alike.
            message: says everything by itself.
            source: the metadata file, if it has one.
            row: its row, if it has one.
            short: what there is to say beside other problems, if the message speaks for more than this row.
        """
        super().__init__(message)
        self.short = short or message
        self.kind = kind
        self.source = source
        self.row = row


Note = Callable[[DataError], None]
"""Told of every problem. What it is told of is left out of the result if it returns."""


def stop(problem: DataError) -> None:
    """The note of a run, which ends with the first problem."""
    raise problem
