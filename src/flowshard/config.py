"""The schema of a run: one YAML file, the same for every layout.

Every option is documented right below the field that defines it; `flowshard train --help` prints exactly these texts.
Reading and merging the YAML is in `config_file.py`. Nothing here imports torch, so that a mistake is found in a moment.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from flowshard.units import parse_amount


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return value


Number = BeforeValidator(_no_truth_value)
PositiveInt = Annotated[int, Number, Field(gt=0)]
NonNegativeInt = Annotated[int, Number, Field(ge=0)]
PositiveFloat = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Number, Field(ge=0, allow_inf_nan=False)]
ActivationPolicy = Literal["keep", "selective", "recompute", "offload"]
Dtype = Literal["float32", "bfloat16", "float16"]
FrozenDtype = Literal["float8", "int8", "nf4"]


def _off(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


class Section(BaseModel):
    """A group of options. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, frozen=True)


class ModelConfig(Section):
    """What is trained."""

    variant: str | None = None
    """The published model, for example `wan2.1-t2v-1.3b`. It decides family, conditions and defaults. If null it is
    recognised by the files."""
    path: str | list[str]
    """Where its weights are: a folder in the diffusers layout or the id of such a repository on the hub; or the publisher's
    own files, as a folder or as a list of files, globs and REPOSITORY:PATTERN."""
    extend: str | None = None
    """`FILE.py:FUNCTION` or `PACKAGE.MODULE:FUNCTION`: gets the transformer before its weights load and adds, replaces or
    removes modules. What it adds is trained, saved and reported."""
    parts: dict[str, str] = {}
    """With the publisher's files: where components are that `path` does not have or that take the place of its own, by
    diffusers' name of them, for example `{tokenizer: models/umt5}`."""
    weights: str | None = None
    """A `.safetensors` file with weights of the transformer, all or some, that take the place of those of `path`; in
    diffusers' or the publisher's names."""
    unexpected: Literal["error", "ignore"] = "error"
    """What to do about weights in the files that the model has no place for, other than those of removed modules."""
    expert: Literal["high", "low"] | None = None
    """Which transformer of a model with two is trained (Wan 2.2 A14B): the one for high noise or for low. It sets the
    range of sigma."""
    layers: PositiveInt | None = None
    """Only the first so many blocks of each kind, to try things out with a shortened model; null is all."""
    dtype: Dtype = "bfloat16"
    """Type of the frozen weights and of autocast. Trainable weights are float32 and are the masters. `float16`, for
    CUDA and NPU, scales the loss and leaves out updates whose gradient overflows."""
    frozen_dtype: FrozenDtype | None = None
    """With `train.method=lora`: hold the weights of the linear layers in the blocks that are not trained in fewer bits, from
    which each layer makes weights of `dtype` while it computes. `float8` and `int8` take half the memory of bfloat16, `nf4` a
    quarter and needs bitsandbytes. It changes the numbers. For the strategies that do not divide weights; null holds them in
    `dtype`."""


class SourceConfig(Section):
    """One of several sets of samples."""

    metadata: str
    """As `data.metadata`."""
    root: str | None = None
    """As `data.root`."""
    repeat: PositiveInt = 1
    """How many times an epoch goes through this metadata; with weights the least number of times."""
    weight: PositiveFloat | None = None
    """Share of the samples that come from here, in proportion to the weights of the others; all have one, or none."""


class DataConfig(Section):
    """What it is trained on. Give `metadata` or `sources`, or a folder as `cache` that was filled before."""

    metadata: str | None = None
    """A `.csv`, `.json` or `.jsonl` file with the columns `prompt` and `video` or `image`; or a folder of media with a
    caption in a `.txt` beside each."""
    sources: list[SourceConfig] = []
    """Several sets of samples, each with `metadata` and, if wanted, `root`, `repeat` and `weight`."""
    root: str | None = None
    """The folder that the media paths start from; the metadata's own folder if null. Only paths inside are read."""
    columns: list[str] | None = None
    """Columns of the metadata that are read besides `prompt`; all others are left aside, as if they were not there. Null
    reads every column that is known."""
    height: PositiveInt | None = None
    """Height in pixels. Media are resized, keeping the aspect ratio, and cropped at the centre. Give `height` and `width`, or
    `max_pixels`."""
    width: PositiveInt | None = None
    """Width in pixels."""
    max_pixels: PositiveInt | None = None
    """Every sample has its own size: that of its medium, or smaller with the same aspect ratio, so that a frame has at most so
    many pixels. Both sides are cut to multiples of `bucket_step`. Nothing is enlarged."""
    bucket_step: PositiveInt | None = None
    """With `max_pixels`, what both sides are cut to multiples of; what the model needs if null. Larger steps give fewer
    shapes, so fuller buckets."""
    buckets: Literal["off", "auto"] = "off"
    """`auto` makes up every step from samples of one shape, as `train.micro_batch` above 1 needs where shapes differ. Needs a
    cache."""
    frames: PositiveInt = 1
    """Frames of a clip. A picture is a clip of one frame."""
    fps: PositiveFloat | None = None
    """Frames a second at which clips are sampled, by the time at which their frames are shown. If null, frames are taken
    one after another as they are stored."""
    sampling: Literal["prefix", "even", "random"] = "prefix"
    """Which frames of a clip: the first ones; evenly spread from first to last; or successive ones from a random place,
    which the seed decides for each row once."""
    short: Literal["refuse", "trim", "repeat"] = "refuse"
    """What becomes of a clip with fewer frames: an error; the largest number of frames that the model can take, which
    needs a cache, and `data.buckets=auto` or `train.micro_batch=1`; or its last frame again."""
    repeat: PositiveInt = 1
    """How many times an epoch goes through the metadata."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a medium that cannot be decoded or is too short does: end the run; or have its place taken by the next row, which
    needs a cache."""
    max_skipped: PositiveInt = 10
    """Rows that `skip` may leave out; more end the run."""
    caption_prefix: str = ""
    """Text that every caption begins with, for example a word that is to stand for what is trained."""
    caption_dropout: Annotated[float, Number, Field(ge=0, le=1)] = 0.0
    """Part of the samples that are trained with an empty caption, drawn anew at every step."""
    input_dropout: Annotated[float, Number, Field(ge=0, lt=1)] = 0.0
    """Share of samples that the model gets without the pictures of the metadata or of the clip, from the prompt alone. For
    models that do without: FLUX.2 and Wan 2.2 TI2V."""
    tiles: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None = None
    """Encode clips in tiles that overlap, which takes less memory and gives slightly other latents: their height and width
    and the steps down and across, in pixels, for example `[272, 272, 144, 128]`. For Wan; null encodes them whole."""
    cache: Annotated[str, BeforeValidator(_off)] = "auto"
    """`auto` encodes every sample once into OUTPUT/cache and trains without encoders; `off` encodes at every step; else
    a folder for the encoded samples, which several runs may share. With neither `metadata` nor `sources`, samples are those
    that were encoded into this folder."""
    cache_set: str | None = None
    """Without `metadata` and `sources`: which of the sets in the folder, by the beginning of its name, if it holds several."""


class GroupConfig(Section):
    """Learning rate and decay of the parameters that a pattern matches."""

    pattern: str
    """Dotted name components that stand next to each other, with `*` and `?`: `attn1`, `blocks.*.ffn`, `lora_B`."""
    learning_rate: NonNegativeFloat | None = None
    """Learning rate of the group, `train.learning_rate` if null. The schedule scales it as well."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of the group, also of the norms and biases that match; the usual rule if null."""


class TrainConfig(Section):
    """How it is trained."""

    method: Literal["lora", "full"] = "lora"
    """`lora` trains low-rank adapters beside frozen weights, `full` the weights themselves."""
    steps: PositiveInt | None = None
    """Optimizer updates of the whole run. Give this or `train.epochs`."""
    epochs: PositiveInt | None = None
    """Passes over the data instead of steps; the last step may reach into the next pass."""
    global_batch: PositiveInt = 1
    """Samples of one update, over all devices. Accumulation is global_batch / (micro_batch * data-parallel degree)."""
    micro_batch: PositiveInt = 1
    """Samples that go through the model at once on one device. Changes speed and memory, not the result."""
    learning_rate: NonNegativeFloat = 1.0e-4
    """Learning rate at the peak of the schedule."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay. Norms, biases and other vectors get none unless `train.groups` says so."""
    optimizer: str = "adamw"
    """`adamw`, or the import path of a torch optimizer, for example `torch.optim.SGD`."""
    optimizer_options: dict[str, Any] = {}
    """Further arguments of the optimizer, for example `{betas: [0.9, 0.99]}`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; `linear` and `cosine` reach 0 at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak, under every schedule."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient over all trained parameters; null does not clip."""
    modules: list[str] = []
    """Patterns of modules or parameters. With `lora`: trained in full beside the adapters. With `full`: only these."""
    groups: list[GroupConfig] = []
    """Learning rate and weight decay by pattern; the first group that matches a parameter counts."""
    ema: Annotated[float, Number, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the trained weights, for example 0.999: each update takes so much of the
    average and the rest of the new weights. Saved in `ema/` of every checkpoint. Null keeps none."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What to do when loss or gradient norm is no finite number: `stop` saves and ends the run, `skip` leaves the update
    out, and ends the run after 10 in a row."""
    skip_spikes: Annotated[float, Number, Field(gt=1, allow_inf_nan=False)] | None = None
    """Leave out updates whose gradient norm is more than so many times the median of the last 100, once there are 10; 10
    left out in a row end the run. Null leaves out none."""


class LoraConfig(Section):
    """Low-rank adapters."""

    rank: PositiveInt = 32
    """Rank of the two factors."""
    alpha: PositiveFloat = 32
    """The product of the factors is scaled by alpha / rank. Saved files have the scale folded in."""
    targets: list[str] | None = None
    """Layers that get an adapter, by the end of their name, in diffusers' or the publisher's vocabulary
    (`to_q` = `q`); the family's default if null."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """What the first factor begins with: uniform values, or normal ones of deviation 1 / rank. The second begins with 0."""
    init_from: str | None = None
    """A LoRA file to go on training from, in any of the formats that `flowshard export` writes. Its rank is `lora.rank`."""
    preset: list[str] = []
    """LoRA files, in any of these formats, that are added to the weights first."""


class ObjectiveConfig(Section):
    """Flow matching: noisy = (1 - sigma) * clean + sigma * noise, the target is noise - clean."""

    preset: Literal["diffsynth"] | None = None
    """`diffsynth` draws and weighs sigma as DiffSynth-Studio does, so that curves of the loss can be compared: one of the
    1000 levels of the series' shifted grid, each as likely as any other, weighed by its bell curve. It takes the place of
    `sampling`, `shift`, `sigma_range` and `weighting`."""
    index_range: tuple[float, float] = (0.0, 1.0)
    """With `preset`: the part of the grid that is drawn from, as fractions of its 1000 places, the noisiest being the
    first."""
    sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """Density of sigma before the shift (https://arxiv.org/abs/2403.03206, section 3.1)."""
    logit_mean: float = 0.0
    """Mean of `logit_normal`."""
    logit_std: PositiveFloat = 1.0
    """Standard deviation of `logit_normal`."""
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = 1.29
    """Scale of `mode`; between -1 and 1.75 its density is positive everywhere."""
    shift: PositiveFloat | Literal["auto"] = "auto"
    """sigma becomes shift * sigma / (1 + (shift - 1) * sigma). `auto` takes the value of the model's scheduler,
    which for Qwen-Image, FLUX.1 and FLUX.2 depends on the number of image tokens."""
    sigma_range: tuple[float, float] = (0.0, 1.0)
    """Only noise levels in this range are drawn, with the density they have in the whole distribution."""
    weighting: Literal["none", "bell"] = "none"
    """`bell` weighs a sample by a bell curve of sigma around 0.5, with mean 1 over the drawn distribution."""
    stratified: bool = True
    """Spread the noise levels of one global batch evenly over the distribution, which lowers the variance."""
    guidance: NonNegativeFloat | Literal["auto"] = "auto"
    """Guidance value that guidance-distilled models (FLUX.1-dev, FLUX.2-dev) get as an input; `auto` is 1. Other models
    take none."""

    @field_validator("sigma_range", "index_range")
    @classmethod
    def _range_is_a_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        low, high = value
        if not 0.0 <= low < high <= 1.0:
            raise ValueError(f"[{low:g}, {high:g}] is not [low, high] with 0 <= low < high <= 1")
        return value


class LayoutConfig(Section):
    """How the run is spread over devices. It never changes the numbers."""

    strategy: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp2"] = "auto"
    """Who holds parameters, gradients and optimizer state. `auto` takes what the launcher is configured for, else
    `single` or `ddp`."""
    shard: PositiveInt | Literal["auto"] = "auto"
    """fsdp2: processes that divide one copy of the model among them; `auto` is all of them."""
    gather_dtype: Literal["auto", "bfloat16"] = "auto"
    """fsdp2: type in which the parameters of blocks travel. `auto` is their own; `bfloat16` halves the traffic of full
    training, and the losses then agree with other layouts within 1e-3 only."""
    offload_optimizer: bool = False
    """zero1, zero2, zero3: keep optimizer state in host memory."""
    offload_parameters: bool = False
    """zero3, fsdp2: keep the divided parameters in host memory (fsdp2: gradients and optimizer state as well)."""
    deepspeed: str | None = None
    """zero1, zero2, zero3: a DeepSpeed JSON file whose settings are added to the run's."""
    timeout_minutes: PositiveFloat = 30.0
    """How long a collective waits for a process before the run ends with an error."""
    sequence: PositiveInt = 1
    """Sequence-parallel degree: neighbouring devices that share the tokens of one sample. It divides their number."""
    ulysses: PositiveInt | Literal["auto"] = "auto"
    """Part of the sequence-parallel degree that exchanges heads; it divides them. `auto` is as much as possible."""
    ring: PositiveInt | Literal["auto"] = "auto"
    """Part of the sequence-parallel degree that passes keys and values round; `auto` is the rest."""


def _text_of_number(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class MemoryConfig(Section):
    """What is kept for the backward pass, and where."""

    activations: ActivationPolicy | Literal["auto"] | dict[ActivationPolicy, PositiveInt] = "keep"
    """What happens to the activations of a block between forward and backward: `keep` all; `selective` keeps the
    attention outputs and recomputes the rest; `recompute` keeps the block's input; `offload` keeps that in host memory.
    Or blocks by policy, as in `{recompute: 20, offload: 10}`: the first 20, the next 10, and the rest are kept. `auto`
    measures blocks and takes the fastest mix that fits in `budget`."""
    offload_overlap: bool = False
    """With `offload`, copy beside the computation: out while the next block computes, back while the block after it does.
    For CUDA and NPU. Off by default, as it has not been run on hardware."""
    parameters: Literal["device", "host"] = "device"
    """Where the frozen weights of the blocks are, with LoRA on one device: `host` keeps them in host memory and has two
    blocks on the device, the one that runs and the next. For CUDA and NPU; it has not been run on hardware."""
    budget: Annotated[str, BeforeValidator(_text_of_number)] | None = None
    """With `auto`, what a process may use: an amount such as `24GB` or `22.5GiB`, or a share of the device's memory such as
    `0.9`. Null is nine tenths of what is free on the device; on the CPU, of the machine's memory, divided among its
    processes."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the repeated blocks, once for each kind of block. `auto` does on CUDA where the compiler works, and says why
    not elsewhere; `true` refuses to start where it cannot be done."""

    @field_validator("budget")
    @classmethod
    def _budget_is_an_amount(cls, value: str | None) -> str | None:
        if value is not None:
            parse_budget(value)
        return value


def parse_budget(text: str) -> int | float:
    """`memory.budget` as bytes (an int), or as a share of the device's memory (a float).

    Raises:
        ValueError: it is neither.
    """
    amount = parse_amount(text)
    if amount is not None:
        return amount
    if re.fullmatch(r"\d+(\.\d+)?|\.\d+", text.strip()) and 0 < float(text) <= 1:
        return float(text)
    raise ValueError(
        f"{text!r} is neither an amount such as 24GB or 22.5GiB (units: MB, GB, TB, MiB, GiB, TiB) nor a share of the "
        "device's memory such as 0.9"
    )


class SaveConfig(Section):
    """What is written during and after the run."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves at the end only. The last step is always saved, once."""
    every_epochs: NonNegativeInt = 0
    """Passes over the data between checkpoints, which are saved at the step that completes the last of them; 0 counts no
    passes."""
    keep: PositiveInt = 3
    """Checkpoints that are kept; older ones are deleted after a newer one is complete."""
    resumable: bool = True
    """Write masters and optimizer state as well, from which `resume` goes on: three float32 values for each trained one."""
    before: str | None = None
    """Save and stop when the run has taken so long, for example `2h50m`, to be in time for a limit of a cluster."""
    dtype: Dtype | Literal["auto"] = "auto"
    """Type of the saved tensors. `auto`: LoRA in float32, full weights in `model.dtype`; what the model keeps in
    float32 stays so."""

    @field_validator("before")
    @classmethod
    def _before_is_a_duration(cls, value: str | None) -> str | None:
        if value is not None and (not value or not re.fullmatch(r"(\d+h)?(\d+m)?(\d+s)?", value)):
            raise ValueError(f"{value!r} is no duration such as 2h50m, 90m or 45s")
        return value


class PromptConfig(Section):
    """One sample to make during training."""

    prompt: str
    """What to show."""
    negative_prompt: str = ""
    """What to avoid, for models that take such a text."""
    seed: NonNegativeInt = 0
    """Seed of the initial noise."""
    inputs: dict[str, str | list[str]] = {}
    """Files of what the model gets besides the prompt, by column of the metadata."""


def _as_prompt(value: Any) -> Any:
    return {"prompt": value} if isinstance(value, str) else value


class ValidationConfig(Section):
    """The loss on samples that are not trained on, and samples during training."""

    every: NonNegativeInt = 0
    """Steps between validations, which are made before the first step and after the last as well; 0 makes none."""
    metadata: str | None = None
    """Samples whose loss is found at each validation: a file as `data.metadata`, whose media paths start from `data.root`
    too."""
    fraction: Annotated[float, Number, Field(gt=0, lt=1)] | None = None
    """Instead of a file, the share of the rows of `data.metadata` that is held out: these are never trained on."""
    prompts: list[Annotated[PromptConfig, BeforeValidator(_as_prompt)]] = []
    """Samples made at each validation: a text, or `{prompt: TEXT, negative_prompt: TEXT, seed: N, inputs: {COLUMN: FILE}}`."""
    steps: PositiveInt = 20
    """Denoising steps of a sample."""
    guidance: NonNegativeFloat | None = None
    """Guidance scale of the samples; the variant's own if null."""
    height: PositiveInt | None = None
    """Height of the samples in pixels; `data.height` if null."""
    width: PositiveInt | None = None
    """Width of the samples in pixels; `data.width` if null."""
    frames: PositiveInt | None = None
    """Frames of the samples; `data.frames` if null."""


class LogConfig(Section):
    """What is measured, and where numbers go besides `metrics.jsonl`."""

    per_rank: bool = False
    """Write the mean loss of each data-parallel rank as well."""
    flops: bool = True
    """Count the floating-point operations of a step before the first one, which takes some seconds for a large model, to
    write them and the share of the devices' peak."""
    profile: bool = False
    """Measure the communication of sequence parallelism, at the price of waiting for the device at each operation."""
    trackers: list[Literal["tensorboard", "wandb", "swanlab"]] = []
    """Experiment trackers that get the numbers as well, in the folder of the run and where the tracker sends them."""
    project: str = "flowshard"
    """Project of wandb and swanlab; the environment variables WANDB_PROJECT and SWANLAB_PROJECT come first."""


class Config(Section):
    """One training run."""

    seed: NonNegativeInt = 0
    """Seed of the order, the noise, the noise levels and of new weights."""
    output: str
    """Folder of the run. An earlier run found there is moved into its `previous/` folder, never overwritten."""
    resume: str | None = None
    """Go on from a checkpoint, under any layout: `auto` is the newest complete one in `output` (none begins a new run), else
    a checkpoint's or a run's folder. `weights:FOLDER` begins a new run with its weights."""
    device: str = "auto"
    """`auto` (CUDA, then Ascend NPU, then CPU), `cpu`, `cuda`, `npu`, or with an index as in `cuda:1`."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    layout: LayoutConfig = LayoutConfig()
    memory: MemoryConfig = MemoryConfig()
    save: SaveConfig = SaveConfig()
    validation: ValidationConfig = ValidationConfig()
    log: LogConfig = LogConfig()

    @property
    def cache_folder(self) -> Path | None:
        """Where encoded samples are kept; None if every step encodes anew."""
        if self.data.cache == "off":
            return None
        return Path(self.output, "cache") if self.data.cache == "auto" else Path(self.data.cache)
