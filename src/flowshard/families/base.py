"""What a model series has to provide. The trainer knows nothing else of a model.

A family is one file with one class; heavy libraries are imported inside its methods, as the registry is read before a
run's input has been checked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowshard.errors import UserError
from flowshard.families.variant import Input, Inputs, Size, Variant
from flowshard.weights.names import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flowshard.families.sequence import SequencePlan, Tokens
    from flowshard.weights.files import TensorInfo
    from flowshard.weights.source import ModelSource

    Tensors = dict[str, torch.Tensor]


class Family(ABC):
    """Models of a series that share architecture, encoders, conditions and training objective."""

    name: ClassVar[str]
    """Of the series."""
    variants: ClassVar[Mapping[str, Variant]]
    pipeline_class: ClassVar[str]
    """Name of the diffusers pipeline."""
    transformer_class: ClassVar[str]
    """Name of the diffusers transformer."""
    marks: ClassVar[Mapping[str, int | bool]] = {}
    """Entries of the transformer's config that tell these models from others with the same pipeline: the value, or whether
    there is one."""
    inputs: ClassVar[tuple[Input, ...]] = ()
    """What the models get besides the prompt."""
    optional_conditions: ClassVar[tuple[str, ...]] = ()
    """How the names of those conditions begin without which a sample is one without `inputs`; empty if there is no such."""
    text_inputs: ClassVar[tuple[str, ...]] = ()
    """Columns of those on which `encode_prompt` depends."""
    media_components: ClassVar[tuple[str, ...]]
    """Subfolders of the pipeline that `encode_media` depends on."""
    text_components: ClassVar[tuple[str, ...]]
    """Subfolders of the pipeline that `encode_text` depends on."""
    spatial_multiple: ClassVar[int]
    """Height and width must be multiples of this: VAE stride times patch size."""
    frame_stride: ClassVar[int]
    """A clip has `frame_stride * k + 1` frames; 1 where any count is legal."""
    takes_tiles: ClassVar[bool] = False
    """Whether the VAE encodes in tiles of a given size."""
    block_lists: ClassVar[Mapping[str, str]]
    """Name of each list of blocks in the transformer to the entry of its config that says how many there are, or lists
    them."""
    heads_setting: ClassVar[str]
    """Entry of the transformer's config that says how many attention heads it has."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Layers that get an adapter by default, in diffusers' names."""
    lora_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names of layers in the publisher's code and in other trainers, to diffusers' names."""
    takes_negative_prompt: ClassVar[bool]
    """Whether the pipeline can do classifier-free guidance."""
    original_weights: ClassVar[str | None] = None
    """Pattern of the publisher's files of the transformer; None if only the diffusers layout is read."""
    original_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Component to patterns of the publisher's file or folder of it."""
    original_experts: ClassVar[Mapping[str, str]] = {}
    """Of models with two transformers: `high` and `low` to the publisher's folder of it."""
    landmark: ClassVar[str | None] = None
    """A tensor of the transformer, in diffusers' names, that no other series has; needed with `original_weights`."""
    names: ClassVar[Vocabulary]
    """Names of the transformer's layers and tensors in the publisher's files."""
    comfyui_names: ClassVar[Vocabulary | None] = None
    """Names of the whole transformer in ComfyUI's files; None if they are the publisher's."""
    remembering: ClassVar[tuple[str, ...]] = ()
    """Attributes of the transformer that keep tensors from one call to the next."""
    text_tokens: ClassVar[int]
    """Tokens of the longest prompt, to which all are padded if `pads_text`; needed with `stand_in`."""
    pads_text: ClassVar[bool] = True
    """Whether every prompt has as many tokens."""
    encoding_version: ClassVar[int]
    """Raised whenever the result of an `encode_` method changes, so that no stale cache entry is used."""

    def check_size(self, height: int, width: int, frames: int, *, where: str) -> None:
        """Refuse a size that the model cannot take; `where` prefixes the option names in the message."""
        for option, value in (("height", height), ("width", width)):
            if value < 1 or value % self.spatial_multiple:
                below = max(value // self.spatial_multiple, 0)
                choices = sorted({max(below, 1) * self.spatial_multiple, (below + 1) * self.spatial_multiple})
                raise UserError(
                    f"{where}{option}: {value} is not a multiple of {self.spatial_multiple}, which {self.name} needs; "
                    f"use {' or '.join(map(str, choices))}"
                )
        if frames < 1 or (frames - 1) % self.frame_stride:
            lower = max((frames - 1) // self.frame_stride, 0) * self.frame_stride + 1
            raise UserError(
                f"{where}frames: {frames} is not {self.frame_stride}k+1, which {self.name} needs; use {lower} or "
                f"{lower + self.frame_stride}"
            )

    def check_tiles(self, tiles: tuple[int, int, int, int], *, option: str) -> None:
        """Refuse tiles in which the VAE cannot encode.

        Args:
            tiles: height, width, and the steps down and across, in pixels.
            option: names the option in messages.

        Raises:
            UserError: naming the number.
        """
        if not self.takes_tiles:
            raise UserError(f"{option}: {self.name} encodes whole pictures; set {option}=null")
        for size, step in zip(tiles[:2], tiles[2:], strict=True):
            multiple = self.spatial_multiple // 2  # the stride of the VAE: a token is two latent pixels wide
            if size % multiple or step % multiple or step > size:
                raise UserError(
                    f"{option}: tiles of {size} pixels at steps of {step}; use multiples of {multiple}, and steps that are "
                    "not larger than the tiles"
                )

    def check_given(self, columns: Set[str], *, where: str) -> None:
        """Refuse a sample for which not enough of the inputs is given, where it takes more than `Input.required` to say.

        Args:
            columns: of the inputs that are given.
            where: begins the message of an error.

        Raises:
            UserError: naming the columns.
        """
        del columns, where

    def foreign_mark(self, config: Mapping[str, Any]) -> str | None:
        """The entry of `marks` by which a transformer with this config is not one of the family's, if there is one."""
        for key, wanted in self.marks.items():
            found = config.get(key)
            if (found is not None) != wanted if isinstance(wanted, bool) else found != wanted:
                return key
        return None

    def other_kind(self, config: Mapping[str, Any]) -> str | None:  # noqa: ARG002
        """What a transformer with this config is, if it is of the series and of a kind for which there is no family."""
        return None

    def shortened(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """What changes in a transformer's config if it keeps the first `layers` blocks of each list."""
        return {key: min(layers, config.get(key, layers)) for key in self.block_lists.values()}

    def few_blocks(self, config: Mapping[str, Any], count: int) -> dict[str, Any]:
        """What changes in a transformer's config if it has `count` blocks of each kind, or all if these are fewer."""
        return self.shortened(config, count)

    def token_count(self, height: int, width: int, frames: int) -> int:
        """Image or video tokens of a sample of a size that `check_size` accepts."""
        return (
            (height // self.spatial_multiple)
            * (width // self.spatial_multiple)
            * ((frames - 1) // self.frame_stride + 1)
        )

    def input_shape(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width at which a picture of `images` is encoded; those of a micro-batch agree in it.

        Args:
            size: width and height of the picture.

        Raises:
            UserError: the model takes no picture of that size.
        """
        width, height = size
        return height, width

    def resolve_targets(self, targets: Sequence[str] | None) -> list[str]:
        """The user's LoRA targets, or the default ones, in diffusers' names."""
        asked = targets or self.lora_targets
        return [name for target in asked for name in self.lora_aliases.get(target, (target,))]

    def shift(self, scheduler: Mapping[str, Any], tokens: int) -> float:
        """The sigma shift with which a sample is generated.

        Args:
            scheduler: settings of the model's scheduler in diffusers' terms.
            tokens: image or video tokens of the sample.
        """
        if not scheduler.get("use_dynamic_shifting"):
            return float(scheduler.get("flow_shift") or scheduler.get("shift") or 1.0)
        mu = self.dynamic_shift(scheduler, tokens)
        return mu if scheduler.get("time_shift_type") == "linear" else math.exp(mu)

    def dynamic_shift(self, scheduler: Mapping[str, Any], tokens: int) -> float:
        """mu of https://arxiv.org/abs/2403.03206, section 5.3.2: linear in the number of tokens."""
        low, high = scheduler.get("base_image_seq_len", 256), scheduler.get("max_image_seq_len", 4096)
        first, last = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
        return float(first + (last - first) * (tokens - low) / (high - low))

    def takes_guidance(self, config: Mapping[str, Any]) -> bool:
        """Whether a transformer with this config is guidance-distilled: it gets the guidance value as an input."""
        return bool(config.get("guidance_embeds", False))

    def load_encoders(self, source: ModelSource, *, dtype: torch.dtype, device: torch.device) -> Any:
        """The stock pipeline without transformer: the frozen models that turn media and text into its inputs."""
        return self.make_pipeline(source, None, dtype=dtype).to(device)

    def make_pipeline(self, source: ModelSource, transformer: Any, *, dtype: torch.dtype, **parts: Any) -> Any:
        """The stock pipeline with this transformer, or without one; what encodes media is in float32.

        Args:
            source: the model's files.
            transformer: the model, or None.
            dtype: of the text encoders.
            parts: further components, such as the second transformer of a model with two.
        """
        import diffusers
        import torch

        types = {"default": dtype, **dict.fromkeys(self.media_components, torch.float32)}
        return getattr(diffusers, self.pipeline_class).from_pretrained(
            source.folder,
            transformer=transformer,
            dtype=types,
            local_files_only=True,
            **{**self.own_parts(source), **parts},
        )

    def own_parts(self, source: ModelSource) -> dict[str, Any]:  # noqa: ARG002
        """Components that take the place of those that the folder of a pipeline describes."""
        return {}

    def pipeline_settings(self, variant: Variant) -> dict[str, Any]:  # noqa: ARG002
        """Arguments of the variant's pipeline that are no components, for files that do not say them."""
        return {}

    def transformer_config(
        self, publishers: Mapping[str, Any] | None, tensors: Mapping[str, TensorInfo], variant: Variant, *, where: str
    ) -> dict[str, Any]:
        """diffusers' config of a transformer in the publisher's files.

        Args:
            publishers: the `config.json` beside the files, if there is one.
            tensors: in diffusers' names.
            variant: whose table has what neither says.
            where: begins the message of an error.

        Raises:
            UserError: config and tensors contradict each other.
        """
        raise NotImplementedError(f"{self.name} has no files but those in the diffusers layout")

    @staticmethod
    def pixels(frames: np.ndarray, device: torch.device) -> torch.Tensor:
        """uint8 RGB of shape (frames, height, width, 3) as float32 in [-1, 1] of shape (1, 3, frames, height, width)."""
        import torch

        return torch.from_numpy(frames).to(device).permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0

    @abstractmethod
    def encode_media(self, encoders: Any, frames: np.ndarray) -> Tensors:
        """Encode one clip or picture.

        Args:
            encoders: from `load_encoders`.
            frames: uint8 RGB of shape (frames, height, width, 3).

        Returns:
            CPU tensors, among them `latents` in float32, scaled as the transformer takes them.
        """

    @abstractmethod
    def encode_text(self, encoders: Any, prompt: str) -> Tensors:
        """Encode one prompt to CPU tensors, without padding unless the model attends to a fixed length of it."""

    def encode_inputs(self, encoders: Any, frames: np.ndarray, inputs: Inputs) -> Tensors:  # noqa: ARG002
        """Encode what the model gets besides the prompt.

        Args:
            encoders: from `load_encoders`.
            frames: the sample's own, uint8 RGB of shape (frames, height, width, 3).
            inputs: what there is of `Family.inputs`.

        Returns:
            CPU tensors, which become conditions beside those of `encode_text`; `latents` takes the place of those of
            `encode_media`.
        """
        return {}

    def encode_prompt(self, encoders: Any, prompt: str, inputs: Inputs) -> Tensors:  # noqa: ARG002
        """`encode_text` for text encoders that also see pictures: what there is of `Family.text_inputs`."""
        return self.encode_text(encoders, prompt)

    def encode_for_pipeline(self, encoders: Any, prompt: str, negative_prompt: str, inputs: Inputs) -> dict[str, Any]:
        """What the stock pipeline's call takes in place of the texts, so that it needs no text encoder.

        Args:
            encoders: from `load_encoders`.
            prompt: what to show.
            negative_prompt: what to avoid; empty for pipelines that take none.
            inputs: what there is of `Family.text_inputs`.
        """
        texts = self.pipeline_texts(self.encode_prompt(encoders, prompt, inputs))
        if self.guided_by_text:
            negative = self.pipeline_texts(self.encode_prompt(encoders, negative_prompt, inputs))
            texts |= {f"negative_{name}": value for name, value in negative.items()}
        return texts

    def pipeline_texts(self, encoded: Tensors) -> dict[str, Any]:
        """Arguments of the stock pipeline's call that stand for one prompt, from what `encode_prompt` gave."""
        return dict(self.batch_conditions([encoded]))

    @property
    def guided_by_text(self) -> bool:
        """Whether the pipeline encodes a second text, of what to avoid."""
        return self.takes_negative_prompt

    @abstractmethod
    def batch_conditions(self, conditions: Sequence[Tensors]) -> Tensors:
        """Join what `encode_media` (without the latents), `encode_inputs` and `encode_prompt` gave for each sample of a micro-batch.

        What is added to make prompts of different length fit together has no influence on any sample.
        """

    @abstractmethod
    def denoise(
        self, transformer: torch.nn.Module, noisy: torch.Tensor, sigma: torch.Tensor, conditions: Tensors
    ) -> torch.Tensor:
        """Predict `noise - clean`.

        Args:
            transformer: the model, wrapped by a strategy or not.
            noisy: latents at noise level `sigma`, shape (batch, ...), in the compute type.
            sigma: float32 of shape (batch,), in [0, 1].
            conditions: from `batch_conditions`, floating tensors in the compute type; for guidance-distilled models also
                `guidance`, shape (batch,).

        Returns:
            The prediction, shaped like `noisy`.
        """

    def stand_in(self, config: Mapping[str, Any], size: Size, *, text_tokens: int, pictures: int) -> Tensors:
        """Zeros in the shapes of what the `encode_` methods give for one sample, to plan without data.

        Args:
            config: of the transformer, with the defaults of its class.
            size: of the sample.
            text_tokens: of its prompt.
            pictures: for each of `inputs` of the kind `images`.
        """
        del config, size, text_tokens, pictures
        raise UserError(
            f"model.variant: the family {self.name} does not say what its samples look like, so cannot be planned"
        )

    def blocks(self, transformer: torch.nn.Module) -> list[torch.nn.Module]:
        """The repeated blocks, in the order of execution."""
        return [block for name in self.block_lists for block in getattr(transformer, name)]

    def without_inputs(self, conditions: Tensors) -> Tensors:
        """The conditions of a sample as those of one that has none of `inputs`; needs `optional_conditions`."""
        return {name: one for name, one in conditions.items() if not name.startswith(self.optional_conditions)}

    def learned(self, latents: torch.Tensor, conditions: Tensors) -> torch.Tensor:  # noqa: ARG002
        """The part of (batch, ...) latents that is predicted; the rest is given, and takes no part in the loss."""
        return latents

    @abstractmethod
    def sequence_plan(self, transformer: torch.nn.Module, tokens: Tokens) -> SequencePlan:
        """How the tokens of the stock transformer are divided among processes."""

    def prepare_for_npu(self, transformer: torch.nn.Module, device: torch.device) -> None:
        """Keep float64 and complex numbers off an Ascend NPU, which has neither, and take its kernels.

        Besides, the model's norms are done by a kernel and `sequence_plan` is put in place, on one process as well, so
        that its processors take the place of the stock ones.

        Args:
            transformer: the stock one; its parameters may be on the meta device.
            device: the NPU.
        """
        del transformer, device

    @abstractmethod
    def tokens(self, shape: torch.Size) -> int:
        """Image or video tokens of one sample whose latents, without batch, have that shape."""

    def reference_tokens(self, conditions: Tensors) -> int:  # noqa: ARG002
        """Tokens that reference pictures add to a sample.

        Args:
            conditions: from `batch_conditions`.
        """
        return 0

    @abstractmethod
    def generate(self, pipeline: Any, **arguments: Any) -> np.ndarray:
        """Call the stock pipeline.

        Args:
            pipeline: the diffusers pipeline of the family.
            arguments: `texts`, `height`, `width`, `frames`, `steps`, `guidance`, `guidance_low`, `generator`,
                `inputs`. `texts` are arguments of the pipeline's call: `prompt` and, where it takes one,
                `negative_prompt`, or what `encode_for_pipeline` gave for them.

        Returns:
            uint8 RGB of shape (frames, height, width, 3).
        """

    @abstractmethod
    def tiny_pipeline(self, variant: Variant, *, seed: int) -> Any:
        """The stock pipeline of the variant, small and with random weights."""

    def write_original(self, pipeline: Any, directory: Path, variant: Variant) -> None:
        """Write a pipeline of a variant as the publisher's files.

        Raises:
            UserError: there is no other format than the diffusers layout.
        """
        del pipeline, directory, variant
        raise UserError(f"--format original: {self.name} is read in the diffusers layout only; use --format diffusers")
