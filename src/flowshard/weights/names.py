"""The publisher's names of layers and tensors, and diffusers' names of the same. Needs no torch.

A publisher may keep several of diffusers' tensors as one, each a range of its rows, or the halves of one in another order.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]
"""diffusers' and the publisher's name of a module or tensor; `*` stands for a number, the same on both sides."""
Fused = Mapping[str, Mapping[str, tuple[int, ...]]]
"""The publisher's name to those of diffusers and the pieces that they consist of, in their order.

Pieces are of equal size and counted in the order of the publisher's rows, from 0; each belongs to one name.
"""
Rows = tuple[tuple[int, int], ...]
"""Ranges of rows, first and end."""


@dataclass(frozen=True)
class Part:
    """One of diffusers' layers or tensors within one of the publisher's."""

    name: str
    """diffusers'."""
    pieces: tuple[int, ...] = (0,)
    """Which pieces of the publisher's rows it consists of, in its own order."""
    of: int = 1
    """Into how many pieces of equal size the publisher's rows are cut."""

    @property
    def is_whole(self) -> bool:
        """Whether both are the same."""
        return self.of == 1

    def rows(self, total: int) -> Rows:
        """Its rows among the publisher's.

        Raises:
            ValueError: the pieces do not divide them.
        """
        if total % self.of:
            raise ValueError(f"{self.of} pieces do not divide {total} rows")
        size = total // self.of
        ranges: list[tuple[int, int]] = []
        for piece in self.pieces:
            start = piece * size
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, (piece + 1) * size))
        return tuple(ranges)


class Vocabulary:
    """Translates dotted names both ways. What stands behind a known name, such as `.weight`, stays."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        fused: Fused | None = None,
        unused: Sequence[str] = (),
        others: Sequence["Vocabulary"] = (),
    ) -> None:
        """Collect names.

        Args:
            pairs: of what is one and the same.
            fused: of what is not.
            unused: the publisher's names of what the model does not use.
            others: names that are read as well, and before these.
        """
        self._others = tuple(others)
        held: dict[str, tuple[Part, ...]] = {theirs: (Part(ours),) for ours, theirs in pairs}
        held.update(dict.fromkeys(unused, ()))
        for theirs, parts in (fused or {}).items():
            of = sum(map(len, parts.values()))
            held[theirs] = tuple(Part(ours, pieces, of) for ours, pieces in parts.items())
        # The longest name first, so that `norm_k_img` is not taken for `norm_k`.
        self._from_original = [(_pattern(theirs), held[theirs]) for theirs in sorted(held, key=_depth)]
        originals = [(part.name, theirs) for theirs, parts in held.items() for part in parts]
        self._to_original = [
            (_pattern(ours), theirs) for ours, theirs in sorted(originals, key=lambda pair: _depth(pair[0]))
        ]

    @classmethod
    def unchanged(cls, *names: str, others: Sequence["Vocabulary"] = ()) -> "Vocabulary":
        """That of a publisher who uses diffusers' names; `names` are those of the model's first level."""
        return cls([(name, name) for name in names], others=others)

    def to_original(self, name: str) -> str | None:
        """The publisher's name of what diffusers calls `name`, or of what holds it; None if it is not known."""
        for pattern, theirs in self._to_original:
            found = pattern.match(name)
            if found:
                return _numbered(theirs, found) + name[found.end() :]
        return None

    def from_original(self, name: str) -> str | None:
        """diffusers' name of what the publisher calls `name`; None if it is not known, or not the same."""
        parts = self.parts(name)
        return parts[0].name if parts is not None and len(parts) == 1 and parts[0].is_whole else None

    def parts(self, name: str) -> tuple[Part, ...] | None:
        """What of diffusers' is in what the publisher calls `name`; None if it is not known."""
        for other in self._others:
            parts = other.parts(name)
            if parts is not None:
                return parts
        for pattern, parts in self._from_original:
            found = pattern.match(name)
            if found:
                rest = name[found.end() :]
                return tuple(Part(_numbered(part.name, found) + rest, part.pieces, part.of) for part in parts)
        return None

    def spellings(self, name: str) -> list[str]:
        """All names of what diffusers calls `name`, or of what holds it."""
        found = [name, self.to_original(name), *(other.to_original(name) for other in self._others)]
        return [one for one in dict.fromkeys(found) if one is not None]


def _depth(name: str) -> int:
    return -len(name.split("."))


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"(?=\.|$)")


def _numbered(template: str, found: re.Match[str]) -> str:
    numbers = iter(found.groups())
    first, *parts = template.split("*")
    return first + "".join(next(numbers) + part for part in parts)
