"""The training run, from checked input to saved weights."""

import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from flowshard.config_file import dump_config
from flowshard.data.dataset import CachedDataset, Encoder, open_datasets
from flowshard.device import Stopwatch, check_dtype, check_frozen_dtype, check_memory_options
from flowshard.errors import RunError
from flowshard.memory.compiled import choose_compile
from flowshard.memory.estimate import MemoryEstimate
from flowshard.objective.grids import noise_levels
from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.sequence import SequenceGroup
from flowshard.parallel.strategies import make_strategy
from flowshard.train.batches import StepBatches, stream
from flowshard.train.build import build_on_meta, fill, loss_function, sample_loss_function, use_masters
from flowshard.train.checkpoint import StateReader, agreed_digest, restore, write_training_state
from flowshard.train.heldout import HeldOut
from flowshard.train.inputs import RunInputs, is_save_due
from flowshard.train.meters import CommunicationMeter, FlopMeter, StepTotals, tokens_of
from flowshard.train.metrics import MetricsLog, StepMetrics, finite
from flowshard.train.observer import Observer
from flowshard.train.optimizer import AVERAGE, averaged, optimizer_factory, schedule_factor
from flowshard.train.plan import check_memory, describe_plan
from flowshard.train.planner import ActivationPlanner
from flowshard.train.record import environment_record
from flowshard.train.samples import Samples
from flowshard.train.state import RunFolder
from flowshard.train.stop import Deadline, StopRequest
from flowshard.train.trackers import start_trackers
from flowshard.train.updates import UpdateGuard
from flowshard.weights.export import WeightsWriter


def run_training(inputs: RunInputs, observer: Observer | None = None) -> Path | None:
    """`train` in the processes that the launcher started."""
    config = inputs.config
    return run_together(
        inputs.layout,
        lambda processes: train(inputs, processes, observer),
        device_name=config.device,
        timeout_minutes=config.layout.timeout_minutes,
    )


def train(inputs: RunInputs, processes: Processes, observer: Observer | None = None) -> Path | None:
    """Run a training job to its end, or to the step at which it is asked to stop.

    Args:
        inputs: checked.
        processes: this one and its peers.
        observer: is shown what the run draws and computes.

    Returns:
        The last checkpoint; None if the run was stopped before its first step.

    Raises:
        UserError: the input is wrong in a way that only decoding or loading can find.
        RunError: loss or gradient is no longer a number, or a checkpoint cannot be written.
    """
    config, layout, device, say = inputs.config, inputs.layout, processes.device, processes.say
    observer = observer or Observer()
    check_dtype(device, config.model.dtype)
    check_memory_options(device, config.memory)
    check_frozen_dtype(device.type, config.model.frozen_dtype)
    dtype = getattr(torch, config.model.dtype)
    make_optimizer = optimizer_factory(config)
    compiling = choose_compile(
        config.memory.compile, layout, processes, host_parameters=config.memory.parameters == "host"
    )

    digest = agreed_digest(inputs.data.training, processes)
    for line in inputs.data.training.notes:
        say(line)

    encoder = Encoder(config, inputs.family, inputs.source, inputs.data.training, dtype, device)
    dataset, held_out_rows = open_datasets(encoder, inputs.data, config.cache_folder, processes=processes)
    levels = noise_levels(config.objective, inputs.shift, inputs.family.name)
    losses_of = sample_loss_function(inputs.family, dtype=dtype, device=device)
    held_out = None
    if held_out_rows is not None:
        held_out = HeldOut(held_out_rows, inputs, levels, losses_of, processes)
    if config.cache_folder is not None:
        encoder.release()
    batches = StepBatches(dataset, inputs.family, config, layout, levels, guidance=inputs.guidance)
    for line in batches.describe_buckets(steps=inputs.steps):
        say(line)

    samples = Samples(inputs, processes, dtype=dtype)
    sequence = SequenceGroup(layout, device, timed=config.log.profile) if layout.sequence > 1 else None
    if layout.ulysses_crosses_machines:
        say(
            f"warning: {layout.ulysses} processes that exchange heads (layout.ulysses) do not lie on one machine of "
            f"{layout.local_world}; a ring sends less between machines"
        )
    largest = batches.largest_micro_batch()
    flops = FlopMeter(inputs, largest, processes)
    loss_of = loss_function(inputs.family, dtype=dtype, device=device)
    planner = ActivationPlanner(inputs, largest, loss_of, processes, compiling)
    build = build_on_meta(
        inputs, sequence, device=device, measure=flops.count, choose=planner.choose, compiling=compiling
    )
    build.new = observer.new_weights(build.new)
    checkpoint = inputs.checkpoint
    reader = None if checkpoint is None else StateReader(checkpoint, () if config.train.ema else (AVERAGE,))
    if checkpoint is not None and reader is not None:
        use_masters(build, checkpoint, reader)
        for line in inputs.changes:
            say(line)

    def plan_memory() -> MemoryEstimate:
        planned = planner.planned(build.model)
        found = planned.estimate(layout, policies=build.policies)
        check_memory(inputs, planned, found, latents=largest.latents.shape[1:], device=device)
        return found

    memory = processes.on_main(plan_memory)
    writer = WeightsWriter(build.model, config)
    strategy = make_strategy(config, processes)
    say(describe_plan(inputs, build, memory, compiling, latents=largest.latents.shape[1:], device=device))
    report = fill(build, inputs, strategy)
    held = f", {len(report.quantised)} held as {config.model.frozen_dtype}" if report.quantised else ""
    say(f"{'weights':<11} {len(report.loaded)} tensors loaded, {len(report.new)} new" + held)
    if config.model.extend is not None or report.dropped or report.fused or inputs.init_from is not None:
        say(report.table())
    strategy.start(build.model, build.settings, make_optimizer)
    guard = UpdateGuard(config.train)
    begin = 0
    if checkpoint is not None and reader is not None and not checkpoint.weights_only:
        begin = checkpoint.step
        restore(reader, checkpoint, strategy, lambda: loss_of(strategy.model, largest.tensors()))
        guard.restore(checkpoint.state["updates"])
        say(f"resumed {checkpoint.path} after step {begin}")
    observer.started(build.model)
    # From here on the run is known to start, and an earlier one may make room.
    folder = RunFolder(Path(config.output))
    record = {**environment_record(), "layout": asdict(layout), "steps": inputs.steps, **planner.record}
    say(
        processes.on_main(
            lambda: folder.prepare(
                dump_config(config, record), resumed=None if checkpoint is None else checkpoint.path, step=begin
            )
        )
    )
    if begin >= inputs.steps:
        say(f"all {inputs.steps} steps are done")
        return None if checkpoint is None else checkpoint.path
    samples.begin(begin, strategy)

    def write(place: Path | None) -> Exception | None:
        failure = writer.write(place, strategy.parameters)
        if config.train.ema is not None and strategy.has_optimizer_state:
            inside = None if failure or place is None else place / AVERAGE
            failure = writer.write(inside, partial(averaged, strategy)) or failure
        if config.save.resumable:
            failure = write_training_state(None if failure else place, strategy) or failure
        return failure

    def save(step: int, keep: int = config.save.keep) -> Path:
        place = folder.save_checkpoint(
            step,
            write,
            state={
                "config": config.model_dump(mode="json"),
                "data": digest,
                "method": config.train.method,
                "lora": config.lora.model_dump() if inputs.adapted else None,
                "loss_scale": strategy.loss_scale.state(),
                "updates": guard.state(),
                "activations": planner.state,
            },
            resumable=config.save.resumable,
            keep=keep,
            processes=processes,
        )
        processes.on_main_for_long("shown", lambda: observer.saved(step, place))
        return place

    accumulation = layout.accumulation
    micro_batches = stream(
        batches,
        range(begin, inputs.steps),
        ahead=isinstance(dataset, CachedDataset),
        pinned=device.type != "cpu",
    )
    watch = Stopwatch(device)
    communication = CommunicationMeter(sequence if config.log.profile else None)
    last, saved = None if checkpoint is None else checkpoint.path, begin
    deadline = Deadline(config.save.before)
    names = config.log.trackers if processes.is_main else []
    shown = config.model_dump(mode="json")
    tracker = start_trackers(names, folder.path, shown, project=config.log.project, begin=begin)
    log = MetricsLog(folder.metrics, folder.validation, tracker, steps=inputs.steps, enabled=processes.is_main)
    with StopRequest() as stop, log:
        # A run that was stopped may have saved this step without validating it.
        if held_out is not None and held_out.due(begin) and not processes.on_main(lambda: folder.is_validated(begin)):
            log.write_held_out(held_out.evaluate(begin, strategy))
        for step in range(begin, inputs.steps):
            watch.start()
            totals = StepTotals(processes, per_rank=config.log.per_rank)
            for number in range(accumulation):
                batch = observer.batch(step, next(micro_batches))
                watch.lap("data")
                with strategy.micro_batch(last=number == accumulation - 1):
                    losses = losses_of(strategy.model, batch.tensors())
                    loss = (losses * batch.weight.to(device, non_blocking=True)).mean() / accumulation
                    watch.lap("forward")
                    # The gradients of processes that share a sample are parts of a sum, and engines take the mean of all.
                    strategy.backward(loss * layout.sequence)
                watch.lap("backward")
                totals.add(loss, losses, batch, tokens_of(batch, inputs.family))
            if stop.reason is None and processes.is_main:
                stop.reason = deadline.reason or ("a file named stop" if folder.stop_requested else None)
            observer.backward_done(step, strategy)
            sums = totals.sum(stopping=stop.reason is not None)
            factor = schedule_factor(step, steps=inputs.steps, train=config.train)
            # All processes know the loss, so all leave out the update together.
            limit = guard.limit(sums.loss)
            norm = strategy.step(factor, limit)
            watch.lap("optimizer")
            overflowed = math.isfinite(sums.loss) and not math.isfinite(norm)
            if math.isfinite(norm) and norm <= limit:
                strategy.loss_scale.succeeded()
                guard.made(norm)
            elif not (overflowed and strategy.loss_scale.lower()) and not guard.leave_out(sums.loss, norm):
                # These weights may be spoilt already, so no earlier checkpoint goes for them.
                kept = save(step, config.save.keep + 1) if step > saved else last
                places = ", ".join(inputs.data.training.describe(row) for row in batches.rows(step))
                raise RunError(
                    f"step {step + 1}: the loss is {sums.loss} and the gradient norm {norm}; the weights were not "
                    f"updated{guard.history} (last checkpoint: {kept}). Samples of the step: {places}. Lower "
                    "train.learning_rate or check these samples"
                )
            seconds = watch.read()
            whole = sum(seconds.values())
            done = step + 1
            observer.step_done(step, sums.loss, norm, strategy)
            log.write(
                StepMetrics(
                    step=done,
                    loss=finite(sums.loss),
                    grad_norm=finite(norm),
                    learning_rate=config.train.learning_rate * factor,
                    samples_per_second=config.train.global_batch / whole,
                    tokens_per_second=sums.tokens / whole,
                    seconds=whole,
                    seconds_data=seconds["data"],
                    seconds_forward=seconds["forward"],
                    seconds_backward=seconds["backward"],
                    seconds_optimizer=seconds["optimizer"],
                    loss_by_sigma=sums.loss_by_sigma,
                    losses_per_rank=sums.losses_per_rank,
                    memory_peak_bytes=sums.memory_peak_bytes,
                    memory_peak_rank=sums.memory_peak_rank,
                    loss_scale=strategy.loss_scale.value,
                    skipped_updates=strategy.loss_scale.skipped + guard.skipped,
                    **flops.read(tokens=sums.tokens, seconds=whole),
                    **communication.read(),
                )
            )
            if done == begin + 1 and (unused := strategy.without_gradient()):
                say(f"{len(unused)} trained tensors got no gradient, which counts as zero: {', '.join(unused[:8])}")
            if held_out is not None and held_out.due(done) and not sums.stopping:
                log.write_held_out(held_out.evaluate(done, strategy))
            if done == inputs.steps or sums.stopping or is_save_due(config, inputs.samples, done):
                last, saved = save(done), done
            if samples.due(done) and not sums.stopping:
                samples.make(done, strategy)
            if sums.stopping:
                say(f"stopped by {stop.reason or 'another process'} after step {done} of {inputs.steps}")
                break
    observer.run_done(strategy)
    if isinstance(dataset, CachedDataset) and dataset.skipped:
        say(f"{dataset.skipped} rows were skipped (data.on_error=skip)")
    say(f"saved {last}")
    return last
