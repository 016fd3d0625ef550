"""The publisher's names of layers and tensors, and diffusers' names of the same. Needs no torch."""

import re
from collections.abc import Sequence

Pair = tuple[str, str]
"""diffusers' and the publisher's name of a module or tensor; `*` stands for a number, the same on both sides."""


class Vocabulary:
    """Translates dotted names both ways. What stands behind a known name, such as `.weight`, stays."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        # The longest name first, so that `norm_k_img` is not taken for `norm_k`.
        ordered = sorted(pairs, key=lambda pair: -len(pair[0].split(".")))
        self._to_original = [(_pattern(ours), theirs) for ours, theirs in ordered]
        ordered = sorted(pairs, key=lambda pair: -len(pair[1].split(".")))
        self._from_original = [(_pattern(theirs), ours) for ours, theirs in ordered]

    @classmethod
    def unchanged(cls, *names: str) -> "Vocabulary":
        """That of a publisher who uses diffusers' names; `names` are those of the model's first level."""
        return cls([(name, name) for name in names])

    def to_original(self, name: str) -> str | None:
        """The publisher's name of what diffusers calls `name`; None if it is not known."""
        return _translate(name, self._to_original)

    def from_original(self, name: str) -> str | None:
        """diffusers' name of what the publisher calls `name`; None if it is not known."""
        return _translate(name, self._from_original)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"(?=\.|$)")


def _translate(name: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, replacement in rules:
        found = pattern.match(name)
        if found:
            numbers = iter(found.groups())
            parts = replacement.split("*")
            translated = parts[0] + "".join(next(numbers) + part for part in parts[1:])
            return translated + name[found.end() :]
    return None
