"""What became of every tensor of a model and of its files, and what to do if something is wrong. Needs no torch."""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowshard.errors import UserError

_SHOWN = 8


def some(names: Collection[str], shown: int = _SHOWN) -> str:
    """The first names, and how many more there are."""
    first = ", ".join(list(names)[:shown])
    return first if len(names) <= shown else f"{first} and {len(names) - shown} more"


@dataclass
class LoadReport:
    """Names are those of the files; of new tensors, those of the model."""

    loaded: list[str] = field(default_factory=list)
    new: dict[str, str] = field(default_factory=dict)
    """Tensors that no file has, by design, to how they got their value: adapters and added modules."""
    fused: list[str] = field(default_factory=list)
    """Weights that a preset LoRA was added to."""
    quantised: dict[str, str] = field(default_factory=dict)
    """Weights that are held in fewer bits, to how."""
    dropped: list[str] = field(default_factory=list)
    """Weights in the files of modules that were removed or replaced, or that were to be ignored."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shape_mismatch: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Name to (shape in the file, shape in the model)."""
    dtype_changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name to (type in the file, type in the model)."""

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain lists and mappings."""
        return asdict(self)

    def table(self) -> str:
        """One line for each kind that there is: how many, and the first names."""
        kinds: list[tuple[str, Collection[str]]] = [("loaded", self.loaded)]
        for how in dict.fromkeys(self.new.values()):
            kinds.append((f"new, {how}", [name for name, own in self.new.items() if own == how]))
        kinds += [
            ("fused", self.fused),
            *((f"held as {how}", self.quantised) for how in sorted(set(self.quantised.values()))),
            ("dropped", self.dropped),
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("shape mismatch", self.shape_mismatch),
            ("type changed", self.dtype_changed),
        ]
        rows = [(kind, names) for kind, names in kinds if names]
        width = max(len(kind) for kind, _ in rows)
        return "\n".join(
            f"{kind:<{width}}  {len(names):>5}" + ("" if kind == "loaded" else f"  {some(names)}")
            for kind, names in rows
        )

    def raise_for_problems(self, source: Path) -> None:
        """Refuse a model that is not filled completely and exactly.

        Raises:
            UserError: tensors are missing, unexpected or of another shape; the message names them and, where it is a
                known mistake, the fix.
        """
        problems = []
        if self.missing:
            problems.append(f"the files lack {some(self.missing)}")
        if self.unexpected:
            problems.append(f"the model has no place for {some(self.unexpected)}")
        if self.shape_mismatch:
            shapes = [f"{name} (file {file}, model {model})" for name, (file, model) in self.shape_mismatch.items()]
            problems.append(f"shapes differ for {some(shapes)}")
        if problems:
            raise UserError(f"{source}: the weights do not fit the model: {'; '.join(problems)}{self._advice()}")

    def _advice(self) -> str:
        if any(re.search(r"\.lora_(A|B|down|up)\b", name) for name in self.unexpected):
            return ". This is a LoRA, not weights: give the base model, and the LoRA as lora.init_from or lora.preset"
        prefix = _prefix(self.unexpected, self.missing)
        if prefix:
            return f". All names start with {prefix!r}, which a wrapper left: take it off when saving"
        if len(self.shape_mismatch) > 2 and not self.missing and not self.unexpected:
            return ". These are the weights of another size of the model: check model.variant and model.path"
        if self.shape_mismatch and not self.missing and not self.unexpected:
            return ". If model.extend replaced them on purpose, let its function return their names"
        if self.unexpected and not self.missing:
            return ". If they are of no use, set model.unexpected=ignore"
        if self.missing and not self.unexpected and not self.loaded:
            return ". A part of the files may be missing; modules that you add belong into model.extend"
        return ""


def _prefix(found: Sequence[str], wanted: Collection[str]) -> str | None:
    """What every found name starts with before a name that is wanted."""
    if not found or not wanted:
        return None
    ends = [name for name in wanted if found[0].endswith(f".{name}")]
    prefix = found[0].removesuffix(max(ends, key=len)) if ends else ""
    return prefix if prefix and all(name.startswith(prefix) for name in found) else None
