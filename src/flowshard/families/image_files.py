"""The files that the publishers of image models give out, read and written.

The transformer is in safetensors files in the names of the family. Text encoders and tokenizers are folders as
transformers saves them, and the VAE is such a folder of diffusers or, as `ae.safetensors`, one file in its publisher's
names (https://github.com/black-forest-labs/flux, src/flux/modules/autoencoder.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count as count_from
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowshard.errors import UserError
from flowshard.weights.names import Vocabulary

if TYPE_CHECKING:
    import torch

    from flowshard.weights.files import TensorInfo

VAE_FILE = "ae.safetensors"
"""The publisher's file of a VAE."""
_GROUPS = 32
"""Of the group norms in published VAEs; as many as there are channels if these are fewer."""
_LEVELS = 4
_ATTENTION = re.compile(r"\.attentions\.0\.to_(q|k|v|out\.0)\.weight$")
"""Linear layers in diffusers, and convolutions of one pixel in the publisher's files."""


def _vae_names() -> Vocabulary:
    pairs = [
        ("bn", "bn"),
        ("quant_conv", "encoder.quant_conv"),
        ("post_quant_conv", "decoder.post_quant_conv"),
    ]
    for half in ("encoder", "decoder"):
        pairs += [
            (f"{half}.conv_in", f"{half}.conv_in"),
            (f"{half}.conv_norm_out", f"{half}.norm_out"),
            (f"{half}.conv_out", f"{half}.conv_out"),
            (f"{half}.mid_block.resnets.0", f"{half}.mid.block_1"),
            (f"{half}.mid_block.resnets.1", f"{half}.mid.block_2"),
        ]
        pairs += [
            (f"{half}.mid_block.attentions.0.{ours}", f"{half}.mid.attn_1.{theirs}")
            for ours, theirs in (
                ("group_norm", "norm"),
                ("to_q", "q"),
                ("to_k", "k"),
                ("to_v", "v"),
                ("to_out.0", "proj_out"),
            )
        ]
    for level in range(_LEVELS):
        down, up = (
            f"encoder.down.{level}",
            f"decoder.up.{_LEVELS - 1 - level}",
        )  # the publisher counts up from the pixels
        pairs += [
            (f"encoder.down_blocks.{level}.resnets.*", f"{down}.block.*"),
            (f"encoder.down_blocks.{level}.downsamplers.0", f"{down}.downsample"),
            (f"decoder.up_blocks.{level}.resnets.*", f"{up}.block.*"),
            (f"decoder.up_blocks.{level}.upsamplers.0", f"{up}.upsample"),
        ]
    shortcuts = [
        (f"{ours}.conv_shortcut", f"{theirs}.nin_shortcut") for ours, theirs in pairs if ours.endswith("resnets.*")
    ]
    return Vocabulary([*pairs, *shortcuts])


VAE_NAMES = _vae_names()
"""Of the VAEs of FLUX.1 and FLUX.2: diffusers' names and the publisher's."""


def parts(*components: str, vae: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """`Family.original_parts` of a model whose text encoders and tokenizers are folders."""
    return {**{name: (name,) for name in components}, "vae": vae}


def load_vae(place: Path, vae_class: str, settings: Mapping[str, Any]) -> torch.nn.Module:
    """A VAE in float32.

    Args:
        place: a folder of diffusers, or a file in diffusers' or the publisher's names.
        vae_class: of diffusers.
        settings: what no file says, for one that comes without a config.

    Raises:
        UserError: the file is broken or holds another model.
    """
    import diffusers
    import torch
    from safetensors.torch import load_file

    from flowshard.weights.files import read_header
    from flowshard.weights.pth import fill

    model_class: Any = getattr(diffusers, vae_class)
    if place.is_dir() and (place / "config.json").is_file():
        vae: torch.nn.Module = model_class.from_pretrained(place, torch_dtype=torch.float32, local_files_only=True)
        return vae
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if len(files) != 1:
        raise UserError(f"{place}: holds {len(files)} .safetensors files of a VAE and no config.json; keep one")
    file = files[0]
    read_header(file)  # for its errors
    tensors = load_file(file)
    try:
        if vae_class == "AutoencoderKLQwenImage":
            sizes = _qwen_vae_sizes(tensors)
        else:
            tensors = {VAE_NAMES.from_original(name) or name: value for name, value in tensors.items()}
            sizes = _vae_sizes(tensors)
    except KeyError as error:
        raise UserError(f"{file}: is no {vae_class}, as it lacks {error}") from None
    for name, value in tensors.items():
        if _ATTENTION.search(name) and value.ndim == 4:
            tensors[name] = value.flatten(1)
    if "bn.running_mean" in tensors:  # a count of training steps, which not every file has
        tensors.setdefault("bn.num_batches_tracked", torch.tensor(0))
    return fill(model_class, {**sizes, **settings}, tensors, torch.float32, file)


def _vae_sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The config of an AutoencoderKL or AutoencoderKLFlux2, as far as its tensors say it."""
    first = "encoder.down_blocks.{}.resnets.{}.conv1.weight"
    channels = [tensors[first.format(level, 0)].shape[0] for level in range(_LEVELS)]
    return {
        "block_out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * _LEVELS,
        "up_block_types": ["UpDecoderBlock2D"] * _LEVELS,
        "layers_per_block": next(count for count in count_from(1) if first.format(0, count) not in tensors),
        "latent_channels": tensors["decoder.conv_in.weight"].shape[1],
        "norm_num_groups": min(_GROUPS, channels[0]),
        "use_quant_conv": "quant_conv.weight" in tensors,
        "use_post_quant_conv": "post_quant_conv.weight" in tensors,
    }


def _qwen_vae_sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "base_dim": tensors["encoder.conv_in.weight"].shape[0],
        "z_dim": tensors["post_quant_conv.weight"].shape[0],
    }


def load_encoder(place: Path, model_class: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model of transformers from its folder."""
    import transformers

    encoder: torch.nn.Module = getattr(transformers, model_class).from_pretrained(
        place, dtype=dtype, local_files_only=True
    )
    return encoder.eval()


def load_tokenizer(place: Path) -> Any:
    """A tokenizer of transformers from its folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, local_files_only=True)


def checked_config(
    config: Mapping[str, Any] | None,
    sizes: Mapping[str, Any],
    *,
    transformer_class: str,
    published: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """diffusers' config of a transformer.

    Args:
        config: the `config.json` beside the weights, if there is one.
        sizes: what the tensors say, in terms of that config.
        transformer_class: of diffusers.
        published: settings that no tensor says, of the published models.
        where: begins the message of an error.

    Raises:
        UserError: config and tensors contradict each other, or there is no config for a model of another kind.
    """
    if config is not None and config.get("_class_name") == transformer_class:
        for key, size in sizes.items():
            if config.get(key, size) != size:
                raise UserError(
                    f"{where}: says {key} {config[key]}, but the tensors have {size}; these files do not belong together"
                )
        return dict(config)
    head_size = sizes.get("attention_head_dim") or sizes["dim"] // sizes["n_heads"]
    published_size = sum(published.get("axes_dims_rope") or published["axes_dims"])
    if head_size != published_size:  # then the axes of the rotary embedding are others too, which no tensor says
        raise UserError(
            f"{where}: is needed, as the model has heads of {head_size} channels, and the published one of "
            f"{published_size}; put the config.json of its {transformer_class} beside the weights"
        )
    return {**sizes, **published}


def count_blocks(tensors: Mapping[str, TensorInfo], blocks: str) -> int:
    """How many blocks a list has."""
    return len({name.split(".")[1] for name in tensors if name.startswith(f"{blocks}.")})


def write(
    pipeline: Any, directory: Path, *, weights: str, names: Vocabulary, folders: Sequence[str], vae_file: bool
) -> None:
    """Write a pipeline's parts as the publisher does.

    Args:
        pipeline: of diffusers.
        directory: new or empty.
        weights: the file of the transformer.
        names: of its tensors.
        folders: components that are folders.
        vae_file: whether the VAE is a file in the publisher's names.
    """
    from safetensors.torch import save_file

    from flowshard.weights.fused import original_tensors

    file = directory / weights
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = original_tensors(pipeline.transformer.state_dict(), names, option="VARIANT")
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    pipeline.transformer.save_config(file.parent)
    for part in folders:
        getattr(pipeline, part).save_pretrained(directory / part)
    if vae_file:
        vae = {}
        for name, value in pipeline.vae.state_dict().items():
            stored = value[..., None, None] if _ATTENTION.search(name) else value
            vae[VAE_NAMES.to_original(name) or name] = stored
        save_file({name: value.contiguous() for name, value in vae.items()}, directory / VAE_FILE)
