"""What runs on an Ascend NPU, on the stand-in for torch_npu in `tests/fakes`, against the same on the CPU.

    python -m tests.workers.npu VARIANT=TRANSFORMER_FOLDER ... CONFIG.yaml ...
    torchrun --nproc-per-node N -m tests.workers.npu VARIANT=TRANSFORMER_FOLDER ...

Transformers are compared, with and without kernels, divided if there are several processes; runs are trained. A process
of its own, as torch keeps what the stand-in registers. Prints a line of JSON for each case that held.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

FAKES = Path(__file__).resolve().parents[1] / "fakes"
KERNELS = ("npu_fusion_attention", "npu_fusion_attention_grad", "npu_rms_norm", "npu_rotary_mul")


def say(**what: Any) -> None:
    """A line of output, by the main process."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        sys.stdout.write(json.dumps(what) + "\n")


@contextmanager
def lacking(*names: str) -> Iterator[None]:
    """A release of torch_npu without these kernels."""
    import torch_npu

    kept = {name: getattr(torch_npu, name) for name in names}
    for name in names:
        delattr(torch_npu, name)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(torch_npu, name, value)


def counted(work: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """What it returns, and how often each kernel ran."""
    import torch_npu

    torch_npu.calls.clear()
    result = work()
    return result, Counter({name: torch_npu.calls[name] for name in KERNELS if torch_npu.calls[name]})


def compare(family: Any, folder: Path, variant: str, processes: Any, *, pictures: bool) -> None:
    """Prediction and gradients of a family's transformer, in float32."""
    import diffusers

    from flowshard.parallel.plan import apply_plans
    from flowshard.parallel.sequence import SequenceGroup
    from tests.workers.family_sequence import cases, run
    from tests.workers.sequence import error

    device, layout = processes.device, processes.layout
    model_class = getattr(diffusers, family.transformer_class)
    stock = model_class.from_pretrained(folder)
    made = cases(family, stock.config, pictures=pictures)
    expected = {name: run(stock, predict) for name, predict in made.items()}
    for without in ((), KERNELS):
        group = SequenceGroup(layout, device) if layout.sequence > 1 else None
        with lacking(*without):
            model = model_class.from_pretrained(folder)
            apply_plans(model, family, group, device)
            model.to(device)
            for name, predict in made.items():
                (found, gradients), ran = counted(partial(run, model, predict))
                output, wanted = expected[name]
                assert error(found, output) <= 1e-5, (variant, name, error(found, output))
                assert gradients.keys() == wanted.keys()
                largest = max(float(one.norm()) for one in wanted.values())
                for weight, gradient in gradients.items():
                    if group is not None:
                        torch.distributed.all_reduce(gradient)  # each process has its part of the sum
                    off = float((gradient - wanted[weight]).norm())
                    scale = max(float(wanted[weight].norm()), 1e-4 * largest)
                    assert off / scale <= 1e-5, (variant, name, weight, off / scale)
                say(variant=variant, case=name, without=len(without), ran=ran)


def refuse(family: Any, folder: Path, device: torch.device) -> None:
    """The stock transformer brings something to the device that is not there."""
    import diffusers
    import torch_npu

    from tests.workers.family_sequence import cases, run

    model = getattr(diffusers, family.transformer_class).from_pretrained(folder)
    predict = next(iter(cases(family, model.config, pictures=False).values()))
    try:
        run(model.to(device), predict)
    except torch_npu.NotOnNpuError as error:
        say(family=family.name, refused=str(error))


def compare_models(variants: dict[str, Path]) -> None:
    """Of the families of these variants."""
    from flowshard.families import find_variant
    from flowshard.parallel.layout import Layout
    from flowshard.parallel.processes import Processes

    world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    ring = min(world, 2)  # whose parts are joined by their log-sum-exp
    strategy = "single" if world == 1 else "ddp"
    layout = Layout(strategy, world, rank, rank, world, "", 1, 1, world, world // ring, ring, None)
    processes = Processes(layout, "npu", timeout_minutes=1)
    assert str(processes.device) == f"npu:{rank}"
    assert world == 1 or torch.distributed.get_backend() == "hccl"
    for variant, folder in variants.items():
        family, _ = find_variant(variant, option="VARIANT")
        compare(family, folder, variant, processes, pictures=False)
        if family.optional_conditions and family.name == "flux2":
            compare(family, folder, variant, processes, pictures=True)
        if world == 1:
            refuse(family, folder, processes.device)
    processes.close()


def train(file: str) -> None:
    """As the config says."""
    import torch_npu

    from flowshard.config_file import load_config
    from flowshard.train.inputs import check_inputs
    from flowshard.train.loop import run_training
    from tests.pictures import shrink_references

    with pytest.MonkeyPatch.context() as patch:
        shrink_references(patch)
        config = load_config(file)
        _, ran = counted(lambda: run_training(check_inputs(config)))
    say(run=file, ran=ran, beside=torch_npu.calls["beside"])


def main(arguments: list[str]) -> None:
    sys.path.insert(0, str(FAKES))
    import torch_npu

    from flowshard.libraries import quiet_libraries

    quiet_libraries()
    variants = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    with torch_npu.hardware():
        compare_models({variant: Path(folder) for variant, folder in variants.items()})
        for argument in arguments:
            if "=" not in argument:
                train(argument)


if __name__ == "__main__":
    main(sys.argv[1:])
