"""The most bytes of tensors that are alive in a process during training, found by looking at every storage there is.

    torchrun --nproc-per-node N -m tests.workers.memory CONFIG.yaml ...

Prints a line of JSON for every config: the peak, of all processes, in the last step.
"""

import gc
import json
import sys
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flowshard.config_file import load_config
from flowshard.libraries import quiet_libraries
from flowshard.parallel.processes import Processes, run_together
from flowshard.parallel.strategies import Strategy
from flowshard.train.inputs import check_inputs
from flowshard.train.loop import train
from flowshard.train.observer import Observer

dist: Any = torch.distributed
_SMALL = 4096
"""Smaller storages are not looked at: there are thousands, and together they are nothing."""


class Storages(TorchDispatchMode):
    """Knows every storage that an operator has returned, and adds up after each operator how large they are now.

    Their size is asked again each time, as engines empty storages in place. Mapped files are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.know(value)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in list(self._storages.values())))
        return result

    def know(self, tensor: torch.Tensor) -> None:
        """Look at a tensor's storage from here on."""
        local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.device.type == "cpu" and storage.filename is None and storage.nbytes() >= _SMALL:
            self._storages[storage._cdata] = storage


class LastStep(Observer):
    """Forgets the peak of the steps before the last."""

    def __init__(self, storages: Storages, steps: int) -> None:
        self._storages, self._steps = storages, steps

    def step_done(self, step: int, loss: float, gradient_norm: float, strategy: Strategy) -> None:
        if step + 2 == self._steps:
            self._storages.peak = 0


def main(files: list[str]) -> None:
    def work(processes: Processes) -> None:
        for file in files:
            inputs = check_inputs(load_config(file))
            gc.collect()
            storages = Storages()
            with storages:
                train(inputs, processes.with_layout(inputs.layout), LastStep(storages, inputs.steps))
            gathered: list[Any] = [None] * inputs.layout.world
            dist.all_gather_object(gathered, storages.peak)
            processes.say(json.dumps({"config": file, "peak": max(gathered)}))

    run_together(check_inputs(load_config(files[0])).layout, work, device_name="cpu")


if __name__ == "__main__":
    quiet_libraries()
    main(sys.argv[1:])
