"""Patterns over dotted parameter and module names, used by `train.modules`, `train.groups` and `lora.targets`."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from flowshard.errors import UserError


def matches(name: str, pattern: str, *, at_end: bool = False) -> bool:
    """Whether the dotted components of `pattern` stand next to each other somewhere in the dotted `name`.

    A component may hold `*` and `?`, which never cross a dot. With `at_end` the pattern has to cover the last
    components: `to_q` then matches the module `blocks.0.attn1.to_q` but not its parameter `blocks.0.attn1.to_q.weight`.
    """
    parts, wanted = name.split("."), pattern.split(".")
    starts = range(len(parts) - len(wanted), -1, -1)
    return any(
        all(fnmatchcase(part, want) for part, want in zip(parts[start:], wanted, strict=False))
        for start in (list(starts)[:1] if at_end else starts)
    )


def select(names: Iterable[str], patterns: Sequence[str], *, option: str, at_end: bool = False) -> list[str]:
    """The names that any pattern matches, in the order of `names`.

    Raises:
        UserError: a pattern matches nothing; the message names `option`, the pattern and the closest names.
    """
    names = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if matches(name, pattern, at_end=at_end)]
        if not found:
            raise UserError(
                f"{option}: the pattern {pattern!r} matches nothing in the model; {_closest(names, pattern, at_end=at_end)}"
            )
        chosen.update(found)
    return [name for name in names if name in chosen]


def _closest(names: Iterable[str], pattern: str, *, at_end: bool) -> str:
    """The parts of `names`, of the length of `pattern`, that look most like it; else a few examples.

    With `at_end` the parts are the tails, elsewhere any neighbouring components.
    """
    length = len(pattern.split("."))
    parts: dict[str, None] = {}
    for name in names:
        components = name.split(".")
        last = max(len(components) - length, 0)
        for start in range(last, last - 1 if at_end else -1, -1):
            parts[".".join(components[start : start + length])] = None
    close = difflib.get_close_matches(pattern, parts, n=3, cutoff=0.6)
    word = "the closest names are" if close else "there are, for example,"
    return f"{word} {', '.join((close or list(parts))[:8])}"
