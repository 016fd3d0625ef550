"""Every strategy on a small module with awkward shapes, against plain torch on the whole batch.

    torchrun --nproc-per-node 3 -m tests.workers.strategies FOLDER

Prints a line for every check that held.
"""

import copy
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from flowshard.config import Config
from flowshard.libraries import quiet_libraries
from flowshard.parallel.layout import resolve_layout
from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.strategies import GroupSettings, Strategy, make_strategy
from flowshard.train.optimizer import optimizer_factory
from flowshard.weights.files import read_headers
from flowshard.weights.load import materialise
from tests import runs

CASES = {
    "ddp": [],
    "zero1": [],
    "zero2": [],
    "zero3": [],
    "fsdp2": [],
    "zero2 optimizer": ["layout.offload_optimizer=true"],
    "zero3 parameters": ["layout.offload_parameters=true"],
    "fsdp2 parameters": ["layout.offload_parameters=true"],
}
"""Strategy, with what it keeps in host memory, to its further options."""
CHECKS = (
    "clipped updates",
    "optimizer state by name",
    "evaluation between updates",
    "restored state",
    "loss scale and overflow",
    "updates left out",
)
SAMPLES, ACCUMULATION, STEPS, CLIP, DECAY = 6, 2, 4, 0.05, 0.75
Tensors = dict[str, torch.Tensor]


class Small(nn.Module):
    """Sizes that three processes do not divide, a parameter of its own, one without use and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 2, bias=False)
        self.scale = nn.Parameter(torch.full((2,), 1.5))
        self.unused = nn.Parameter(torch.full((4,), 0.5))
        self.frozen = nn.Parameter(torch.tensor([0.3]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x))) * self.scale + self.frozen
        return result


def batch(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean() * 10


def settings(model: nn.Module) -> dict[str, GroupSettings]:
    """Two groups, one without decay."""
    return {n: GroupSettings(1e-2, 0.1 * (p.ndim > 1)) for n, p in model.named_parameters() if p.requires_grad}


class Reference:
    """Plain torch after every update."""

    def __init__(self, start: Small) -> None:
        model = copy.deepcopy(start)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        chosen = settings(model)
        groups = [{"params": [p], "lr": 1e-2, "weight_decay": chosen[n].weight_decay} for n, p in named.items()]
        optimizer = torch.optim.AdamW(groups)
        self.weights: list[Tensors] = [_copies(dict(model.named_parameters()))]
        self.states: list[dict[str, Tensors]] = [{}]
        self.norms: list[float] = []
        self.gradients: list[Tensors] = []
        for step in range(STEPS):
            loss_of(model, batch(step)).backward()
            for p in named.values():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.gradients.append(_copies({name: p.grad for name, p in named.items() if p.grad is not None}))
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            self.weights.append(_copies(dict(model.named_parameters())))
            self.states.append({name: _copies(optimizer.state[p]) for name, p in named.items()})
            for name, state in self.states[-1].items():  # the moving average of all weights up to now, as a sum
                older = sum((1 - DECAY) * DECAY ** (step - k) * self.weights[k + 1][name] for k in range(step + 1))
                state["ema"] = older + DECAY ** (step + 1) * self.weights[0][name]


def _copies(tensors: Tensors) -> Tensors:
    return {name: value.detach().clone() for name, value in tensors.items()}


def make(config: Config, processes: Processes, weights: Tensors, folder: Path) -> Strategy:
    """A started strategy whose model has these weights, loaded from a file as a run does."""
    processes.on_main(lambda: save_file(weights, folder / "weights.safetensors"))
    strategy = make_strategy(config, processes.with_layout(resolve_layout(config)))
    with torch.device("meta"):
        model = Small()
    chosen, units = settings(model), [model.first, model.second]
    strategy.shard(model, units)
    tensors = read_headers(folder)
    materialise(model, tensors, source=folder, units=units, new={}, strategy=strategy)
    strategy.start(model, chosen, optimizer_factory(config))
    processes.wait_for_all("loaded")
    return strategy


def update(
    strategy: Strategy, step: int, rank: int, poison: float = 1.0, limit: float = math.inf
) -> tuple[float, Tensors]:
    """One update with this process's slice of the batch; the gradient norm and the gradients."""
    share = SAMPLES // torch.distributed.get_world_size()
    mine = batch(step)[rank * share : (rank + 1) * share]
    for number, part in enumerate(mine.chunk(ACCUMULATION)):
        with strategy.micro_batch(last=number == ACCUMULATION - 1):
            strategy.backward(loss_of(strategy.model, part) * poison / ACCUMULATION)
    gradients = _copies(dict(strategy.gradients()))
    return strategy.step(1.0, limit), gradients


def close(found: Tensors, expected: Tensors, bound: float = 1e-6) -> None:
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm() / max(float(value.norm()), 1e-6)
        assert found[name].shape == value.shape, (name, found[name].shape)
        assert error <= bound, (name, float(error), found[name], value)


def elements(strategy: Strategy) -> int:
    """Of all parameters, those that this process holds."""
    with strategy.evaluation() as model:
        parameters: list[Any] = list(model.parameters())
        return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)


def checks(name: str, folder: Path, reference: Reference, processes: Processes) -> Iterator[str]:
    """Run one strategy; a line for every check."""
    layout = [
        f"layout.strategy={name.split()[0]}",
        *CASES[name],
        f"train.global_batch={SAMPLES}",
        f"train.clip_norm={CLIP}",
        f"train.ema={DECAY}",
    ]
    rank, every = processes.layout.rank, list(reference.weights[0])
    configs = folder / f"rank-{rank}"
    config = runs.config(Path("model"), Path("data"), configs / name, *layout)

    strategy = make(config, processes, reference.weights[0], folder)
    assert not strategy.has_optimizer_state
    for step in range(2):
        norm, gradients = update(strategy, step, rank)
        assert abs(norm - reference.norms[step]) <= 1e-6 * reference.norms[step], (norm, reference.norms[step])
        assert norm > CLIP
        close(gradients, reference.gradients[step], 1e-5)
    assert strategy.without_gradient() == ["unused"], strategy.without_gradient()
    close(dict(strategy.parameters(every)), reference.weights[2])
    yield CHECKS[0]
    state = {parameter: _copies(values) for parameter, values in strategy.optimizer_state()}
    assert list(state) == list(reference.states[2])
    for parameter, expected in reference.states[2].items():
        assert state[parameter].keys() == expected.keys()
        close(state[parameter], expected, 1e-5)
    average = dict(strategy.optimizer_tensors(["first.weight", "scale"], "ema"))
    close(average, {parameter: reference.states[2][parameter]["ema"] for parameter in average})
    yield CHECKS[1]

    restored = make(config, processes, reference.weights[2], folder)
    restored.restore_optimizer_state(reference.states[2].__getitem__, lambda: loss_of(restored.model, batch(0)[:1]))
    close(dict(restored.parameters(every)), reference.weights[2], 0.0)
    held = elements(restored)
    with restored.evaluation() as model, torch.no_grad():
        outputs = [model(batch(9)) for _ in range(3)]
        assert not model.training
    expected_output = torch.func.functional_call(Small(), reference.weights[2], batch(9))
    assert all(torch.allclose(output, expected_output, rtol=1e-6) for output in outputs)
    assert model.training and elements(restored) <= held
    yield CHECKS[2]
    for step in (2, 3):
        norm, _ = update(restored, step, rank)
        assert abs(norm - reference.norms[step]) <= 1e-5 * reference.norms[step], (norm, reference.norms[step])
    close(dict(restored.parameters(every)), reference.weights[4])
    final = {parameter: state["ema"] for parameter, state in reference.states[4].items()}
    close(dict(restored.optimizer_tensors(list(final), "ema")), final)
    yield CHECKS[3]

    half = runs.config(Path("model"), Path("data"), configs / f"{name}-16", *layout, "model.dtype=float16")
    scaled = make(half, processes, reference.weights[0], folder)
    assert scaled.loss_scale.value == 2.0**16
    norm, gradients = update(scaled, 0, rank)
    close(gradients, reference.gradients[0], 1e-5)
    assert abs(norm - reference.norms[0]) <= 1e-6 * reference.norms[0]
    close(dict(scaled.parameters(every)), reference.weights[1])
    norm, _ = update(scaled, 0, rank, poison=float("inf") if rank == 1 else 1.0)
    assert not torch.isfinite(torch.tensor(norm)), norm
    assert scaled.loss_scale.lower()
    close(dict(scaled.parameters(every)), reference.weights[1])
    norm, _ = update(scaled, 1, rank)
    close(dict(scaled.parameters(every)), reference.weights[2])
    yield CHECKS[4]

    guarded = make(config, processes, reference.weights[0], folder)
    for step, limit in ((0, -math.inf), (0, reference.norms[0] / 2), (0, 2 * reference.norms[0]), (1, 0.0)):
        norm, _ = update(guarded, step, rank, limit=limit)
        assert abs(norm - reference.norms[step]) <= 1e-5 * reference.norms[step], (norm, reference.norms[step])
        close(dict(guarded.parameters(every)), reference.weights[int((step, limit) > (0, reference.norms[0]))], 1e-6)
    update(guarded, 1, rank)
    close(dict(guarded.parameters(every)), reference.weights[2])
    state = {parameter: _copies(values) for parameter, values in guarded.optimizer_state()}
    for parameter, expected in reference.states[2].items():
        close(state[parameter], expected, 1e-5)
    yield CHECKS[5]


def main(folder: Path) -> None:
    torch.manual_seed(0)
    reference = Reference(Small())
    own = folder / f"leader-{os.environ['RANK']}"
    config = runs.config(Path("model"), Path("data"), own, f"train.global_batch={SAMPLES}")

    def work(processes: Processes) -> None:
        for name in CASES:
            for done in checks(name, folder, reference, processes):
                processes.say(f"{name}: {done}")

    run_together(resolve_layout(config), work, device_name="cpu")


if __name__ == "__main__":
    quiet_libraries()
    main(Path(sys.argv[1]))
