"""A command line of DiffSynth-Studio's scripts, read strictly. Needs no torch."""

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from flowshard.compat.options import BY_NAME, SCRIPTS, Option, Script
from flowshard.errors import UserError

_OVERRIDES = "set"
"""Option whose values are overrides of the config."""


class Arguments(argparse.Namespace):
    """The options of a command line by their names; those that were not given have their defaults."""

    given: frozenset[str]
    """Names of those that were given."""
    overrides: list[str]
    """Values of `--set`."""
    script: Script
    """Whose options they are."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def listed(self, name: str) -> list[str]:
        """The parts of a value that are separated by commas; none if there is no value."""
        return [part.strip() for part in (self[name] or "").split(",") if part.strip()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


class _Help(argparse.Action):
    """Prints every option of a script with what it becomes."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, const: Script) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS)
        self._script = const

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(describe(self._script))
        parser.exit()


def parse(script: Script, arguments: Sequence[str]) -> Arguments:
    """Read a command line.

    Raises:
        UserError: an option is unknown, not honoured, has a wrong value, or is missing.
    """
    parser = _Parser(prog=script.path, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action=_Help, const=script)
    parser.add_argument(f"--{_OVERRIDES}", dest="overrides", action="append", default=argparse.SUPPRESS)
    for option in script.options:
        _add(parser, option)
    parsed, others = parser.parse_known_args(arguments)
    given = vars(parsed)
    _refuse(given, others, script)
    missing = [option.flag for option in script.options if option.required and option.name not in given]
    if missing:
        raise UserError(f"{', '.join(missing)} must be given")
    defaults = {one.name: one.default for one in script.options if not one.refused}
    overrides = given.pop("overrides", [])
    return Arguments(**{**defaults, **given}, given=frozenset(given), overrides=overrides, script=script)


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    if option.kind is bool:
        parser.add_argument(option.flag, action="store_true", default=argparse.SUPPRESS)
    else:
        parser.add_argument(option.flag, type=option.kind, default=argparse.SUPPRESS)


def _refuse(given: Mapping[str, Any], others: Sequence[str], script: Script) -> None:
    for option in script.options:
        if option.name in given and option.refused:
            raise UserError(f"{option.flag}: not honoured here: {option.refused}")
    if not others:
        return
    name = others[0].split("=")[0]
    if not name.startswith("-"):
        raise UserError(f"{name!r}: an argument that belongs to no option; put a text with spaces in quotes")
    known = BY_NAME.get(name.removeprefix("--"))
    if known is not None:
        scripts = ", ".join(SCRIPTS[series].path for series in known.scripts)
        raise UserError(f"{name}: {script.path} has no such option; it belongs to {scripts}")
    names = [option.flag for option in script.options if not option.refused]
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    advice = f"did you mean {nearest[0]}?" if nearest else f"see {script.path} --help"
    raise UserError(f"{name}: unknown option; {advice}")


def describe(script: Script) -> str:
    """Every option of a script and what it becomes here, as text."""
    lines = [
        f"usage: {script.path} [options]",
        "",
        "Trains from the options of DiffSynth-Studio's script of the same name. What each becomes here:",
        "",
    ]
    for option in script.options:
        text = f"not honoured: {option.refused}" if option.refused else option.becomes
        if option.default not in (None, False):
            text += f" (default: {option.default})"
        lines.append(f"  {option.flag}")
        lines += textwrap.wrap(text, 100, initial_indent="      ", subsequent_indent="      ")
    lines += [
        f"  --{_OVERRIDES} a.b=value",
        "      an option of the config, as after `flowshard train CONFIG`; may be repeated",
    ]
    return "\n".join(lines) + "\n"


_FIELD = re.compile(r"^([a-z_]+(?:\.[a-z_0-9]+)*)(?=: )", re.MULTILINE)


def in_their_words(message: str, arguments: Arguments) -> str:
    """A message about the config, with the options of the command line that decide what it names."""

    def named(found: re.Match[str]) -> str:
        field = found[1]
        deciding = [option for option in arguments.script.options if field in option.fields and not option.refused]
        given = [option.flag for option in deciding if option.name in arguments.given]
        flags = given or [option.flag for option in deciding if hasattr(arguments, option.name)]
        return f"{' / '.join(flags)} ({field})" if flags else field

    return _FIELD.sub(named, message)
