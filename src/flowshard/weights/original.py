"""A model's parts in the publisher's own files. Needs no torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from flowshard.errors import UserError
from flowshard.families import all_families
from flowshard.families.base import Family
from flowshard.families.variant import Variant
from flowshard.weights.files import TensorInfo, read_header, read_json
from flowshard.weights.names import Part
from flowshard.weights.places import all_of, beside, expert_of, label, opened_at, part_of
from flowshard.weights.report import some

Headers = Callable[[Path], dict[str, TensorInfo]]
"""Reads the header of a safetensors file, or remembers it."""
_WRAPPERS = ("model.diffusion_model.", "diffusion_model.", "pipe.dit.", "pipe.vace.")
"""Prefixes of single files that hold the transformer as a part of something."""
_ENCODER_TENSORS = {
    "text_model.embeddings.token_embedding.weight",  # CLIP
    "encoder.block.0.layer.0.SelfAttention.q.weight",  # T5
    "model.embed_tokens.weight",  # Qwen, Mistral
}
"""Tensors by which text encoders are known that other programs keep in one file."""


@dataclass(frozen=True)
class OriginalFiles:
    """What the publisher's files of a model hold."""

    parts: Mapping[str, Path]
    """Encoders and tokenizer by diffusers' component name."""
    tensors: Mapping[str, TensorInfo]
    """The transformer's, in diffusers' names."""
    config: Mapping[str, Any]
    """The transformer's, in diffusers' terms."""


def recognise_files(path: str | Sequence[str], option: str) -> list[tuple[Family, Variant, Mapping[str, Any]]]:
    """The variants that the publisher's files may be of by the names of tensors, and what their settings would be.

    What no file says of a variant's pipeline is taken to be as it has it.

    Raises:
        UserError: the files are broken, or contradict each other.
    """
    places = all_of(path, option)
    headers = cache(read_header)
    candidates: list[tuple[Family, Variant, Mapping[str, Any]]] = []
    problems: list[UserError] = []
    for family, opened in _families_of(places, headers, option).items():
        files = [file for file in opened if is_transformer_file(file)]
        first = expert_of(files[0], family)
        tensors = transformer_tensors(
            [one for one in files if expert_of(one, family) == first], family, headers, option
        )
        for variant in family.variants.values():
            if variant.experts is None and first is not None:
                continue
            # A folder would have both transformers; files that a list names can be of either kind.
            if variant.experts is not None and first is None and any(place.is_dir() for place in places):
                continue
            try:
                config = _transformer_config(tensors, family, variant, option)
                candidates.append((family, variant, {**family.pipeline_settings(variant), **config}))
            except UserError as error:  # of a size that the variant does not have
                problems.append(error)
    if problems and not candidates:
        raise problems[0]
    return candidates


def _families_of(places: list[Path], headers: Headers, option: str) -> dict[Family, list[Path]]:
    """The families that the publisher's files may be of, by the names of tensors in the first file that says it.

    Returns:
        To the files that each of them finds.
    """
    known: dict[Family, list[Path]] = {}
    for family in all_families():
        if family.original_weights is not None:
            try:
                known[family] = [file for place in places for file in opened_at(place, family, option)]
            except UserError:  # a folder of another family
                continue
    for family, files in known.items():
        for file in files:
            if is_transformer_file(file) and _has_landmark(headers(file), family):
                return _by_parts({one: own for one, own in known.items() if one.landmark == family.landmark})
    return {}


def _by_parts(families: dict[Family, list[Path]]) -> dict[Family, list[Path]]:
    """Of families whose transformers are alike those whose parts are all there and are the most, if there are such."""
    complete: dict[Family, int] = {}
    for family, files in families.items():
        named = {found[0] for file in files if (found := part_of(file, family)) is not None}
        if all(
            part in named or beside(family, one, [file.parent for file in files])
            for part, one in family.original_parts.items()
        ):
            complete[family] = len(family.original_parts)

    def best(family: Family) -> bool:
        alike = [
            one for one in families if (one.transformer_class, one.marks) == (family.transformer_class, family.marks)
        ]
        return complete.get(family, 0) == max(complete.get(one, 0) for one in alike)

    return {family: files for family, files in families.items() if best(family)}


def is_transformer_file(file: Path) -> bool:
    """Whether a file may hold a transformer: it is an encoder of no family."""
    return file.suffix == ".safetensors" and all(part_of(file, family) is None for family in all_families())


def _has_landmark(names: Iterable[str], family: Family) -> bool:
    return any(part.name == family.landmark for name in names for part in _ours(name, family))


def read_original(
    path: str | Sequence[str],
    family: Family,
    variant: Variant,
    *,
    option: str,
    expert: str | None,
    encoders: bool = True,
    own: Mapping[str, Path] | None = None,
) -> OriginalFiles:
    """Find and check the publisher's files of a model; no tensor is read.

    Args:
        path: a folder, or a list of files, globs, folders and `REPOSITORY:PATTERN`.
        family: of the model.
        variant: whose table has what the files do not say.
        option: names the option in messages.
        expert: which transformer of a model with two; None is that for high noise.
        encoders: whether it is an error if encoders are missing.
        own: parts that take the place of those found, by component.

    Raises:
        UserError: something is missing, broken or of another model; the message names it.
    """
    files, wanted = _of_expert(_places(path, family, variant, option), family, variant, expert, option)
    parts, weights = _sorted_out(files, family, option)
    parts |= own or {}
    tensors = transformer_tensors(weights, family, read_header, option)
    if not tensors:
        raise UserError(f"{option}: {label(path)} holds no weights of the transformer ({wanted})")
    assert family.landmark is not None  # noqa: S101
    if family.landmark not in tensors:
        _refuse_other_model(tensors, family, family.landmark, option)
    config = _transformer_config(tensors, family, variant, option)
    _refuse_other_kind(tensors, config, family, variant, option)
    _add_beside(parts, [info.file.parent for info in tensors.values()], family)
    _check_parts(parts, path, family, variant, option, complete=encoders)
    return OriginalFiles(parts, tensors, config)


def find_original_encoders(
    path: str | Sequence[str],
    family: Family,
    variant: Variant,
    *,
    option: str,
    own: Mapping[str, Path] | None = None,
) -> Mapping[str, Path]:
    """Encoders and tokenizer in the publisher's files by diffusers' component name; the transformer need not be there.

    Raises:
        UserError: something is missing or is no file of the model; the message names it.
    """
    places = _places(path, family, variant, option)
    parts, weights = _sorted_out([place for place in places if not _is_model_folder(place, family)], family, option)
    parts |= own or {}
    _add_beside(parts, [*(file.parent for file in weights), *filter(Path.is_dir, places)], family)
    _check_parts(parts, path, family, variant, option, complete=True)
    return parts


def _is_model_folder(place: Path, family: Family) -> bool:
    return place.is_dir() and part_of(place, family) is None


def _places(path: str | Sequence[str], family: Family, variant: Variant, option: str) -> list[Path]:
    """The files and folders of a path.

    Raises:
        UserError: some do not exist, or the variant has none of its publisher.
    """
    if family.original_weights is None:
        raise UserError(
            f"{option}: {label(path)}: {variant.name} is read in the diffusers layout only; give a folder with a "
            f"model_index.json, or the id of such a repository, for example {variant.hub_id}"
        )
    return all_of(path, option)


def _sorted_out(files: Sequence[Path], family: Family, option: str) -> tuple[dict[str, Path], list[Path]]:
    """Encoders and tokenizer by component, and files that may be of the transformer."""
    parts: dict[str, Path] = {}
    weights: list[Path] = []
    for file in dict.fromkeys(files):
        found = part_of(file, family)
        if found is not None:
            part, place = found
            parts[part] = place
        elif file.suffix == ".safetensors":
            weights.append(file)
        else:
            known = ", ".join(dict.fromkeys(one for patterns in family.original_parts.values() for one in patterns))
            raise UserError(
                f"{option}: {file} is no file that {family.name} has; it has {known} and .safetensors weights"
            )
    return parts, weights


def _add_beside(parts: dict[str, Path], folders: Sequence[Path], family: Family) -> None:
    """Add the parts that lie beside those that are known, or in other folders of the model."""
    for part, patterns in family.original_parts.items():
        if part not in parts:
            found = beside(family, patterns, [*(place.parent for place in parts.values()), *folders])
            if found is not None:
                parts[part] = found


def _check_parts(
    parts: Mapping[str, Path],
    path: str | Sequence[str],
    family: Family,
    variant: Variant,
    option: str,
    *,
    complete: bool,
) -> None:
    for part, patterns in family.original_parts.items():
        if part not in parts:
            if complete:
                raise UserError(
                    f"{option}: {label(path)} lacks the {part} ({' or '.join(patterns)}); add it to the list"
                )
        elif part.startswith("text_encoder") and parts[part].is_dir():
            _check_encoder(parts[part], variant, option)


def _of_expert(
    places: list[Path], family: Family, variant: Variant, expert: str | None, option: str
) -> tuple[list[Path], str]:
    """The files of a model without those of its other transformer, and the pattern of the transformer's.

    Raises:
        UserError: a folder has one transformer and the variant two, or the other way round.
    """
    files: list[Path] = []
    for place in places:
        opened = opened_at(place, family, option)
        is_two = any(expert_of(file, family) is not None for file in opened)
        if is_two != (variant.experts is not None) and (is_two or opened != [place]):
            found, has = ("two transformers", "one") if is_two else ("one transformer", "two")
            raise UserError(
                f"{option}: {place} is of a model with {found}, {variant.name} has {has}; give the right files or change "
                "model.variant"
            )
        files += opened
    if variant.experts is None:
        return files, str(family.original_weights)
    own = expert or "high"
    kept = [file for file in files if expert_of(file, family) in (own, None)]
    return kept, f"{family.original_experts[own]}/{family.original_weights}"


def transformer_tensors(files: list[Path], family: Family, headers: Headers, option: str) -> dict[str, TensorInfo]:
    """The tensors of a transformer in files, in diffusers' names.

    Raises:
        UserError: a file is something else, or two hold the same.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header = headers(file)
        if not _ENCODER_TENSORS.isdisjoint(header):
            raise UserError(
                f"{option}: {file} is a text encoder in one file; {family.name} takes "
                f"{' or '.join(family.original_parts['text_encoder'])} of its publisher"
            )
        for name, info in _translated(header, family).items():
            if name in tensors:
                raise UserError(
                    f"{option}: {tensors[name].file} and {file} both hold the transformer's {name}; give one of them"
                )
            tensors[name] = info
    return tensors


def _transformer_config(
    tensors: Mapping[str, TensorInfo], family: Family, variant: Variant, option: str
) -> dict[str, Any]:
    """The config of a transformer, from its tensors and the publisher's config beside them.

    Raises:
        UserError: they contradict each other.
    """
    publishers = next(iter(tensors.values())).file.parent / "config.json"
    return family.transformer_config(
        read_json(publishers) if publishers.is_file() else None, tensors, variant, where=f"{option}: {publishers}"
    )


def _translated(header: Mapping[str, TensorInfo], family: Family) -> dict[str, TensorInfo]:
    """The tensors of a publisher's or a single file, in diffusers' names; what is not known keeps its own.

    Raises:
        UserError: one that holds several cannot be cut into them.
    """
    tensors = {}
    for name, info in header.items():
        for part in _ours(name, family):
            if part.is_whole:
                tensors[part.name] = replace(info, stored=name)
                continue
            try:
                rows = part.rows(info.shape[0] if info.shape else 1)
            except ValueError:
                raise UserError(
                    f"{info.file}: {name} of shape {info.shape} is not {part.of} pieces of one size, as it is in "
                    f"{family.name}; it is another model, or one in a type with fewer values"
                ) from None
            shape = (sum(end - start for start, end in rows), *info.shape[1:])
            tensors[part.name] = replace(info, stored=name, rows=rows, shape=shape)
    return tensors


def _refuse_other_model(tensors: Mapping[str, TensorInfo], family: Family, landmark: str, option: str) -> None:
    """Say what weights without the family's landmark are.

    Raises:
        UserError: always.
    """
    file = next(iter(tensors.values())).file
    for other in all_families():  # one without a landmark is not recognised
        if _has_landmark((info.stored or name for name, info in tensors.items()), other):
            raise UserError(
                f"{option}: {file} holds a transformer of {other.name}, and the variant is one of {family.name}; give "
                f"other files, or set the variant to {' or '.join(other.variants)}"
            )
    if any(".lora_" in name for name in tensors):
        raise UserError(f"{option}: {file} is a LoRA, not weights; give it as lora.init_from or lora.preset")
    stored = family.names.to_original(landmark)
    raise UserError(
        f"{option}: {file} is no transformer of {family.name}, as it lacks {stored}; it has {some(list(tensors))}"
    )


def _refuse_other_kind(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], family: Family, variant: Variant, option: str
) -> None:
    """Refuse a transformer of the series that is conditioned on something else than the family's, and say on what.

    Raises:
        UserError: it is such a one.
    """
    mark = family.foreign_mark(config)
    kinds = [one for one in all_families() if one.landmark == family.landmark and one.foreign_mark(config) is None]
    if mark is None:  # series that have no other mark than their sizes
        mark, heads = family.heads_setting, config.get(family.heads_setting)
        kinds = [one for one in kinds if any(row.heads == heads for row in one.variants.values())]
        if family in kinds or not kinds:
            return
    file = next(iter(tensors.values())).file
    names = " or ".join(name for one in kinds for name in one.variants)
    fix = f"it is of {names}: give other files or change model.variant" if names else "give other files"
    raise UserError(
        f"{option}: {file} has {mark} {config.get(mark)}, which {variant.name} has not; "
        + (other_kind_message(family, config) or fix)
    )


def other_kind_message(family: Family, config: Mapping[str, Any]) -> str | None:
    """What to say of a transformer of a kind for which there is no family, if it is such a one."""
    kind = family.other_kind(config)
    return kind and f"it is of {kind}, for which diffusers has no pipeline; give other files"


def _check_encoder(folder: Path, variant: Variant, option: str) -> None:
    """Refuse an encoder's folder without a file that its weights are of no use without.

    Raises:
        UserError: naming the file.
    """
    needed = [] if (folder / "config.json").is_file() else ["config.json"]
    if len(list(folder.glob("*.safetensors"))) > 1 and not list(folder.glob("*.safetensors.index.json")):
        needed.append("the .safetensors.index.json of its shards")
    if needed:
        raise UserError(
            f"{option}: {folder} lacks {' and '.join(needed)}; copy it as well, from {variant.hub_id} if it was not changed"
        )


def _ours(name: str, family: Family) -> tuple[Part, ...]:
    """What of diffusers' a tensor in a publisher's or a single file holds."""
    for prefix in ("", *_WRAPPERS):
        if name.startswith(prefix):
            bare = name.removeprefix(prefix)
            parts = family.names.parts(bare)
            if parts is not None:
                return parts
            if family.names.to_original(bare) is not None:
                return (Part(bare),)
    return (Part(name),)
