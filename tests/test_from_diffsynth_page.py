"""`docs/from-diffsynth.md` says of every option what becomes of it."""

import re
from collections.abc import Sequence

from flowshard.compat.options import ALL, OPTIONS, SCRIPTS, Option
from flowshard.compat.wan_t2v_options import EARLIER_OPTIONS
from tests.conftest import REPOSITORY
from tests.recipes import LAUNCHERS

PAGE = (REPOSITORY / "docs" / "from-diffsynth.md").read_text(encoding="utf-8")
OURS = {"--set"}


def _table(head: str) -> list[list[str]]:
    """The rows below a table's head, by cells."""
    _, _, rest = PAGE.partition(f"{head}\n")
    assert rest, f"the page has no table {head}"
    lines = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def _options(cell: str) -> list[str]:
    return re.findall(r"`(--[a-z_0-9]+)`", cell)


def _default(option: Option) -> str:
    return "" if option.default is None or option.default is False else f"`{option.default}`"


def _as_read(text: str) -> str:
    """Without what sets names off."""
    return text.replace("`", "").replace("$", "")


def _assert_described(rows: Sequence[Sequence[str]], options: Sequence[Option]) -> None:
    described = {name: (default, _as_read(here)) for cell, default, here in rows for name in _options(cell)}
    wanted = {option.flag: (_default(option), _as_read(option.becomes)) for option in options}
    assert {name: one for name, one in described.items() if name not in OURS} == wanted
    assert described.keys() >= OURS


def test_every_option_is_described_with_its_default_and_what_it_becomes() -> None:
    rows = _table("| option | scripts, if not all | default | here |")
    _assert_described(
        [[name, default, here] for name, _, default, here in rows], [one for one in OPTIONS if not one.refused]
    )
    scripts = {name: cell for names, cell, *_ in rows for name in _options(names)}
    for option in OPTIONS:
        if not option.refused:
            folders = "" if option.scripts == ALL else ", ".join(SCRIPTS[series].folder for series in option.scripts)
            assert scripts[option.flag] == folders
    _assert_described(_table("| option | default | here |"), EARLIER_OPTIONS)


def test_every_refused_option_is_named_with_what_to_do() -> None:
    described = {name: _as_read(instead) for cell, instead in _table("| option | instead |") for name in _options(cell)}
    assert described == {option.flag: _as_read(option.refused) for option in OPTIONS if option.refused}


def test_every_script_and_launcher_file_is_named() -> None:
    named = re.findall(r"`(examples/[a-z0-9_/]+\.py)`", PAGE)
    assert {script.path for script in SCRIPTS.values()} <= set(named)
    assert all((REPOSITORY / path).is_file() for path in named)
    for file in LAUNCHERS:
        assert "/".join(file.parts[file.parts.index("model_training") + 1 :]) in PAGE
