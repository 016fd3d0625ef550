"""Options that contradict one another, which their types cannot say."""

from flowshard.config import Config, DataConfig, MemoryConfig, ObjectiveConfig
from flowshard.errors import UserError
from flowshard.objective.presets import PLACES


def check_conflicts(config: Config) -> None:
    """Refuse options that contradict one another.

    Raises:
        UserError: naming the options.
    """
    if config.memory.budget is not None and config.memory.activations != "auto":
        raise UserError(
            f"memory.budget: {config.memory.budget}, but only memory.activations=auto plans with it; set that, or "
            "memory.budget=null"
        )
    _check_overlap(config.memory)
    _check_parameters(config)
    _check_data(config.data, config.train.micro_batch)
    _check_preset(config.objective)
    train = config.train
    if (train.steps is None) == (train.epochs is None):
        state = "neither is" if train.steps is None else f"train.steps is {train.steps} and train.epochs {train.epochs}"
        raise UserError(f"give exactly one of train.steps and train.epochs ({state}); set the other to null")
    if train.global_batch % train.micro_batch:
        raise UserError(
            f"train.global_batch {train.global_batch} is not a multiple of train.micro_batch {train.micro_batch}; "
            f"use a micro_batch of {_divisors(train.global_batch)}"
        )
    validation = config.validation
    if validation.metadata is not None and validation.fraction is not None:
        raise UserError("give one of validation.metadata and validation.fraction; set the other to null")
    held_out = validation.metadata is not None or validation.fraction is not None
    if validation.every and not held_out and not validation.prompts:
        raise UserError(
            f"validation.every: {validation.every}, but there is nothing to validate with; set validation.fraction or "
            "validation.metadata for the loss on held-out samples, validation.prompts for samples, or validation.every=0"
        )
    if train.method == "full" and config.model.frozen_dtype is not None:
        raise UserError(
            f"model.frozen_dtype: {config.model.frozen_dtype!r} is for weights that are not trained; use train.method=lora, or "
            "model.frozen_dtype=null"
        )
    for option, given in (("lora.targets", config.lora.targets), ("lora.init_from", config.lora.init_from)):
        if train.method == "full" and given is not None:
            raise UserError(f"{option} has no effect with train.method=full; use train.modules or train.method=lora")


def _check_overlap(memory: MemoryConfig) -> None:
    """Refuse overlapping copies where no block makes any."""
    asked = memory.activations
    if not memory.offload_overlap or asked == "offload" or (isinstance(asked, dict) and "offload" in asked):
        return
    if asked == "auto":
        raise UserError(
            "memory.offload_overlap: true, but memory.activations=auto measures one block at a time, where nothing overlaps; "
            "set memory.activations=offload, or blocks by policy, or memory.offload_overlap=false"
        )
    raise UserError(
        f"memory.offload_overlap: true, but memory.activations is {asked if isinstance(asked, str) else dict(asked)}, which "
        "offloads no block; set memory.activations=offload, or memory.offload_overlap=false"
    )


def _check_parameters(config: Config) -> None:
    """Refuse weights in host memory for what needs them on the device."""
    if config.memory.parameters == "device":
        return
    if config.train.method == "full":
        raise UserError(
            "memory.parameters: host, but with train.method=full weights are trained, and those stay on the device; use "
            "train.method=lora, or layout.strategy=fsdp2 with layout.offload_parameters=true"
        )
    if config.memory.compile is True:
        raise UserError(
            "memory.parameters: host, but memory.compile is true, and compiled blocks expect the same weights at every step; "
            "set memory.compile=auto or false"
        )
    if config.model.frozen_dtype is not None:
        raise UserError(
            f"memory.parameters: host, but with model.frozen_dtype={config.model.frozen_dtype} frozen weights are no parameters "
            "that could be streamed; set one of the two to its default"
        )


def _check_preset(objective: ObjectiveConfig) -> None:
    """Refuse options that a preset takes the place of, and those that belong to one."""
    if objective.preset is None:
        if objective.index_range != (0.0, 1.0):
            raise UserError("objective.index_range: counts places of a grid; set objective.preset, or use sigma_range")
        return
    for name in ("sampling", "shift", "sigma_range", "weighting"):
        if getattr(objective, name) != ObjectiveConfig.model_fields[name].default:
            raise UserError(
                f"objective.{name}: {getattr(objective, name)!r} has no effect with objective.preset={objective.preset}; "
                "leave it out, or set objective.preset=null"
            )
    low, high = (int(bound * PLACES) for bound in objective.index_range)
    if low == high:
        raise UserError(
            f"objective.index_range: {list(objective.index_range)} holds none of the {PLACES} places; widen it"
        )


def from_cache(data: DataConfig) -> bool:
    """Whether samples come from a cache folder alone."""
    return data.metadata is None and not data.sources


def _check_data(data: DataConfig, micro_batch: int) -> None:
    if data.metadata is not None and data.sources:
        raise UserError(f"give one of data.metadata ({data.metadata!r}) and data.sources; set the other to null or []")
    cached = from_cache(data)
    if cached and data.cache in ("auto", "off"):
        raise UserError(
            "data.metadata: give data.metadata or data.sources, or set data.cache to a folder that `flowshard cache` has filled"
        )
    if data.cache_set is not None and not cached:
        raise UserError("data.cache_set has no effect with data.metadata or data.sources; set it to null")
    if data.root is not None and data.metadata is None:
        with_what = "without metadata" if cached else "with data.sources; give each source a root"
        raise UserError(f"data.root has no effect {with_what}")
    sides = [data.height, data.width]
    if data.max_pixels is not None and sides != [None, None]:
        raise UserError(
            f"give data.height and data.width, or data.max_pixels ({data.max_pixels}); set the others to null"
        )
    if None in sides and data.max_pixels is None and not (cached and sides == [None, None]):
        raise UserError(
            f"data.{'height' if data.height is None else 'width'}: give data.height and data.width, or data.max_pixels, with "
            "which every sample keeps its own size"
        )
    if data.bucket_step is not None and data.max_pixels is None and not cached:
        raise UserError("data.bucket_step has no effect without data.max_pixels; set it to null")
    if data.buckets == "auto" and data.cache == "off":
        raise UserError(
            "data.buckets: the shapes of samples are known from a cache; use another data.cache than off, or data.buckets=off"
        )
    if data.short == "trim" and micro_batch > 1 and data.buckets == "off":
        raise UserError(
            f"data.short: clips that are trimmed differ in length, but train.micro_batch {micro_batch} needs samples of one "
            "shape; use data.buckets=auto, train.micro_batch=1, or data.short=repeat or refuse"
        )
    if data.short == "trim" and data.cache == "off":
        raise UserError(
            "data.short: how long trimmed clips are is known from a cache, to plan memory with the longest; use another "
            "data.cache than off, or data.short=repeat or refuse"
        )
    if data.on_error == "skip" and data.cache == "off":
        raise UserError(
            "data.on_error: which media are skipped is known from a cache, before the first step; use another data.cache than "
            "off, or data.on_error=stop"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
