"""The training run, from checked input to saved weights."""

import math
import sys
from pathlib import Path

import torch

from flowshard.config_file import dump_config
from flowshard.data.dataset import CachedDataset, Encoder, open_dataset
from flowshard.data.metadata import Row
from flowshard.device import Stopwatch, memory_peak_bytes, resolve_device
from flowshard.errors import RunError
from flowshard.memory.estimate import estimate_memory
from flowshard.objective.sigmas import NoiseLevels
from flowshard.parallel.strategies import Single, Strategy
from flowshard.train.batches import StepBatches, stream
from flowshard.train.build import build_transformer, loss_function
from flowshard.train.inputs import RunInputs
from flowshard.train.metrics import MetricsLog, StepMetrics
from flowshard.train.optimizer import optimizer_factory, parameter_groups, schedule_factor
from flowshard.train.plan import describe_plan
from flowshard.train.record import environment_record
from flowshard.train.state import RunFolder
from flowshard.train.stop import StopRequest
from flowshard.weights.export import write_weights


def train(inputs: RunInputs) -> Path | None:
    """Run a training job to its end, or to the step at which it is asked to stop.

    Returns:
        The last checkpoint; None if the run was stopped before its first step.

    Raises:
        UserError: the input is wrong in a way that only decoding or loading can find.
        RunError: loss or gradient is no longer a number, or a checkpoint cannot be written.
    """
    config = inputs.config
    device = resolve_device(config.device)
    dtype = getattr(torch, config.model.dtype)
    make_optimizer = optimizer_factory(config)

    if inputs.metadata.unused_columns:
        _say(f"{inputs.metadata.path}: unused columns: {', '.join(inputs.metadata.unused_columns)}")

    encoder = Encoder(config, inputs.family, inputs.folder, inputs.metadata, dtype, device)
    dataset = open_dataset(encoder, config.cache_folder, progress=_say)
    batches = StepBatches(dataset, inputs.family, config, NoiseLevels(config.objective, inputs.shift))

    model, report = build_transformer(inputs, device=device)
    loss_of = loss_function(inputs.family, dtype=dtype, device=device)
    largest = batches.largest_micro_batch()
    memory = estimate_memory(model, loss_of, largest.tensors(), make_optimizer)
    _say(describe_plan(inputs, model, report, memory, latents=largest.latents.shape[1:], device=device))
    groups = parameter_groups(model, config.train)
    folder = RunFolder(Path(config.output))
    _say(folder.prepare(dump_config(config, environment_record())))  # from here on the run is known to start
    strategy: Strategy = Single(model, groups, make_optimizer, clip_norm=config.train.clip_norm)

    def save(step: int, keep: int = config.save.keep) -> Path:
        return folder.save_checkpoint(
            step,
            lambda partial: write_weights(partial, model, strategy.trained_parameters(), config),
            state={"method": config.train.method, "lora": config.lora.model_dump() if inputs.adapted else None},
            keep=keep,
        )

    accumulation = config.train.global_batch // config.train.micro_batch
    micro_batches = stream(batches, range(inputs.steps), ahead=isinstance(dataset, CachedDataset))
    watch = Stopwatch(device)
    checkpoint, saved = None, 0
    with StopRequest() as stop, MetricsLog(folder.metrics, steps=inputs.steps) as log:
        for step in range(inputs.steps):
            watch.start()
            total = torch.zeros((), device=device)
            tokens = 0
            rows: list[Row] = []
            for _ in range(accumulation):
                batch = next(micro_batches)
                watch.lap("data")
                loss = loss_of(strategy.model, batch.tensors()) / accumulation
                watch.lap("forward")
                strategy.backward(loss)
                watch.lap("backward")
                total += loss.detach()
                tokens += len(batch.rows) * inputs.family.tokens(batch.latents.shape[1:])
                rows += batch.rows
            norm = strategy.gradient_norm()
            loss_value, norm_value = total.item(), norm.item()
            if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
                # These weights may be spoilt already, so no earlier checkpoint goes for them.
                kept = save(step, config.save.keep + 1) if step > saved else checkpoint
                places = ", ".join(inputs.metadata.describe(row) for row in rows)
                raise RunError(
                    f"step {step + 1}: the loss is {loss_value} and the gradient norm {norm_value}; the weights were not "
                    f"updated (last checkpoint: {kept}). Samples of the step: {places}. Lower train.learning_rate or "
                    "check these samples"
                )
            factor = schedule_factor(step, steps=inputs.steps, train=config.train)
            strategy.step(factor, norm)
            watch.lap("optimizer")
            seconds = watch.read()
            whole = sum(seconds.values())
            done = step + 1
            log.write(
                StepMetrics(
                    step=done,
                    loss=loss_value,
                    grad_norm=norm_value,
                    learning_rate=config.train.learning_rate * factor,
                    samples_per_second=config.train.global_batch / whole,
                    tokens_per_second=tokens / whole,
                    seconds=whole,
                    seconds_data=seconds["data"],
                    seconds_forward=seconds["forward"],
                    seconds_backward=seconds["backward"],
                    seconds_optimizer=seconds["optimizer"],
                    memory_peak_bytes=memory_peak_bytes(device),
                )
            )
            if done == 1 and (unused := list(strategy.without_gradient())):
                _say(f"{len(unused)} trained tensors got no gradient, which counts as zero: {', '.join(unused[:8])}")
            every = config.save.every
            if done == inputs.steps or stop.reason or (every and done % every == 0):
                checkpoint, saved = save(done), done
            if stop.reason:
                _say(f"stopped by {stop.reason} after step {done} of {inputs.steps}")
                break
    if checkpoint is not None:
        _say(f"saved {checkpoint}")
    return checkpoint


def _say(text: str | None) -> None:
    if text:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
