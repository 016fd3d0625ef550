"""ZeRO-1, 2 and 3: optimizer state, gradients and parameters divided by DeepSpeed."""

import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flowshard.errors import UserError
from flowshard.parallel.strategies.base import (
    GroupSettings,
    LearningRates,
    OptimizerFactory,
    Strategy,
    Tensors,
    grouped,
)
from flowshard.parallel.strategies.scaling import LossScale


class DeepSpeed(Strategy):
    """One engine of DeepSpeed."""

    def __init__(
        self, device: torch.device, *, clip_norm: float | None, loss_scale: LossScale, config: dict[str, Any]
    ) -> None:
        """Import DeepSpeed.

        Args:
            device: of this process.
            clip_norm: largest gradient norm, or None; the engine has it from its config.
            loss_scale: of the run.
            config: from `deepspeed_config`.

        Raises:
            UserError: the environment asks DeepSpeed for another kind of device.
        """
        super().__init__(device, clip_norm=clip_norm, loss_scale=loss_scale)
        self._config = config
        self._stage: int = config["zero_optimization"]["stage"]
        self._waiting: dict[int, torch.Tensor] = {}
        """Values of the parameters of the unit that is being filled, by the parameter's id."""
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        _check_accelerator(device)
        if device.type == "cpu":
            _skip_shared_memory_build()
        import deepspeed

        self._deepspeed = deepspeed
        # Takes over our process group; until then its collectives see one process.
        deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)

    def place(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self._stage != 3 or not isinstance(parameter, torch.nn.Parameter):
            return super().place(parameter, value)
        # The engine divides a unit parameter by parameter, and sends each whole from the first process to all others, who
        # write it into theirs. So all of them lie in the same scratch memory, and nothing that matters is in it: the values
        # come from the mapped files afterwards, each process reading its own part.
        scratch = self._scratch.get(parameter.dtype)
        if scratch is None or scratch.numel() < parameter.numel():
            scratch = self._scratch[parameter.dtype] = torch.empty(
                parameter.numel(), dtype=parameter.dtype, device=self.device
            )
        placed = torch.nn.Parameter(
            scratch[: parameter.numel()].view(parameter.shape), requires_grad=parameter.requires_grad
        )
        self._waiting[id(placed)] = value
        return placed

    def settle(self, unit: torch.nn.Module) -> None:
        if self._stage != 3:
            return
        waiting: list[tuple[Any, torch.Tensor]] = [
            (parameter, self._waiting.pop(id(parameter)))
            for parameter in unit.parameters()
            if id(parameter) in self._waiting
        ]
        self._deepspeed.zero.Init(module=unit, config_dict_or_path=self._config)
        for parameter, value in waiting:
            parameter.ds_tensor.data.copy_(self._slice(parameter, value))

    def start(self, model: torch.nn.Module, settings: Mapping[str, GroupSettings], optimizer: OptimizerFactory) -> None:
        self._scratch.clear()
        self._unwrapped = model
        self._trained, groups = grouped(model, settings)
        self._reached: set[str] = set()
        self._hooks = [
            parameter.register_hook(lambda _, name=name: self._reached.add(name))
            for name, parameter in self._trained.items()
        ]
        self._unused: list[str] = []
        self.model, self._optimizer, _, _ = self._deepspeed.initialize(
            model=model, optimizer=optimizer(groups), config=self._config, dist_init_required=False
        )
        self._engine: Any = self.model
        self._torch_optimizer: Any = self._optimizer.optimizer
        self._rates = LearningRates(self._optimizer)
        self._ready_to_step = False
        self._limit = math.inf
        self._torch_optimizer.step = self._unless_too_large(self._torch_optimizer.step)

    def micro_batch(self, *, last: bool) -> Any:
        if self._ready_to_step:  # the engine counts micro-batches by calls of its step, all but the last do nothing
            self._engine.step()
        self._ready_to_step = not last
        return super().micro_batch(last=last)

    def _release(self) -> None:
        if self._stage == 3:
            self._engine.empty_partition_cache()

    def backward(self, loss: torch.Tensor) -> None:
        self._optimizer.loss_scale = self.loss_scale.value  # the engine applies it and takes it out
        self._engine.backward(loss, scale_wrt_gas=False)

    def _unless_too_large(self, update: Callable[[], object]) -> Callable[[], None]:
        """The optimizer's update, to be left out by itself: the engine knows the norm only on its way there.

        `_global_grad_norm` is private; `tests/test_deepspeed.py` fails when it changes.
        """

        def perhaps() -> None:
            if self._limit == math.inf or float(self._optimizer._global_grad_norm) <= self._limit:
                update()

        return perhaps

    def step(self, factor: float, limit: float = math.inf) -> float:
        self._limit = limit
        self._unused = [name for name in self._trained if name not in self._reached]
        self._reached.clear()
        self._rates.scale(factor)
        self._engine.step()  # leaves out the update if the norm is not finite
        norm = self._engine.get_global_grad_norm()
        value = float(norm) if norm is not None else math.nan
        return value if value >= 0 else math.inf  # -1 stands for a norm that is not finite

    def parameters(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._unwrapped.state_dict(keep_vars=True)
        for name in names:
            tensor = tensors[name]
            if not hasattr(tensor, "ds_id"):
                yield name, tensor.detach()
                continue
            with self._deepspeed.zero.GatheredParameters([tensor]):
                full = tensor.detach().clone()
            yield name, full

    def trained_names(self) -> list[str]:
        return list(self._trained)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self._trained.items():
            yield name, safe_get_full_grad(parameter) / self.loss_scale.value

    @property
    def has_optimizer_state(self) -> bool:
        return any(self._torch_optimizer.state.values())

    def optimizer_tensors(self, names: Sequence[str], key: str) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        _link_optimizer_state(self._optimizer)
        for name in names:
            parameter = self._trained[name]
            yield name, safe_get_full_optimizer_state(parameter, key).view(self._shape(parameter))

    def optimizer_state(self) -> Iterator[tuple[str, Tensors]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        _link_optimizer_state(self._optimizer)
        scalars, shaped = _split(next(iter(self._torch_optimizer.state.values()), {}))
        for name, parameter in self._trained.items():
            full = {key: safe_get_full_optimizer_state(parameter, key).view(self._shape(parameter)) for key in shaped}
            yield name, {**scalars, **full}

    def restore_optimizer_state(self, read: Callable[[str], Tensors], warm_up: Callable[[], torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        for number in range(self._config["gradient_accumulation_steps"]):
            with self.micro_batch(last=number == self._config["gradient_accumulation_steps"] - 1):
                self.backward(warm_up() * 0.0)
        self.step(0.0)
        _link_optimizer_state(self._optimizer)
        scalars: Tensors = {}
        for name, parameter in self._trained.items():
            scalars, full = _split(read(name))
            for key, value in full.items():
                if self._stage == 3:
                    safe_set_local_optimizer_state(parameter, self._slice(parameter, value).to(self.device), key)
                else:
                    safe_set_full_optimizer_state(parameter, value.to(self.device), key)
        # One flat tensor holds many parameters, so it has one of each; all parameters of a run are updated together.
        for state in self._torch_optimizer.state.values():
            for key, value in scalars.items():
                state[key] = (
                    value.clone().to(state[key].device) if isinstance(state[key], torch.Tensor) else value.item()
                )

    def _slice(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """The part of a full value that this process holds under ZeRO-3, padded with zeros."""
        size = parameter.ds_tensor.numel()
        part = value.flatten()[torch.distributed.get_rank() * size :][:size]
        return torch.nn.functional.pad(part, (0, size - part.numel()))

    def _shape(self, parameter: Any) -> torch.Size:
        shape: torch.Size = parameter.ds_shape if self._stage == 3 else parameter.shape
        return shape

    def without_gradient(self) -> list[str]:
        return self._unused


def _split(state: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
    """Of what a torch optimizer keeps for a parameter: the scalars, and what is shaped like it."""
    tensors = {key: torch.as_tensor(value) for key, value in state.items() if value is not None}
    shaped = {key: value for key, value in tensors.items() if value.ndim}
    return {key: value for key, value in tensors.items() if key not in shaped}, shaped


def _link_optimizer_state(optimizer: Any) -> None:
    """Make the state of every parameter group reachable through its parameters, for ZeRO-1 and 2.

    DeepSpeed does so once, after the first group's first update, when the other groups have no state yet. The two names
    are private; `tests/test_deepspeed.py` fails when they change.
    """
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _check_accelerator(device: torch.device) -> None:
    """Refuse an environment in which DeepSpeed would not work on the run's kind of device."""
    asked = os.environ.get("DS_ACCELERATOR", device.type)
    if asked != device.type:
        raise UserError(f"DS_ACCELERATOR: is {asked!r} in the environment, and the run is on {device}; unset it")
    if device.type == "npu" and "ASCEND_HOME_PATH" not in os.environ:
        raise UserError(
            "ASCEND_HOME_PATH: is not set, and DeepSpeed needs it; source the set_env.sh of the CANN toolkit"
        )


def _skip_shared_memory_build() -> None:
    """Keep DeepSpeed from compiling an operator for collectives within one machine, which needs a compiler and 20 s.

    `deepspeed.comm.torch.build_shm_op` is private; `tests/test_deepspeed.py` fails when it changes.
    """
    module: Any = importlib.import_module("deepspeed.comm.torch")
    module.build_shm_op = lambda: None
