"""`flowshard report`."""

from collections.abc import Sequence
from pathlib import Path

from flowshard.errors import UserError
from flowshard.report.data import read_run
from flowshard.report.page import page
from flowshard.weights.files import atomic_file


def report(folders: Sequence[Path], output: Path | None) -> Path:
    """Write the page of one or several runs.

    Args:
        folders: of the runs.
        output: the page; `report.html` in the first folder if None.

    Returns:
        The page.

    Raises:
        UserError: a folder is no run, or the page cannot be written.
    """
    if len({folder.absolute() for folder in folders}) < len(folders):
        raise UserError("RUN: a folder is given twice; give each run once")
    text = page([read_run(folder) for folder in folders], _names(folders))
    target = folders[0] / "report.html" if output is None else output
    try:
        with atomic_file(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: {target} cannot be written: {error}; choose another file") from None
    return target


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, with as many before it as it takes to tell them apart."""
    parts = [folder.absolute().parts for folder in folders]
    length = 1
    while len({one[-length:] for one in parts}) < len(parts):
        length += 1
    return ["/".join(one[-length:]) for one in parts]
