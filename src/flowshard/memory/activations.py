"""What a block keeps between forward and backward, decided for each block from outside the model.

The models call `gradient_checkpointing_func(block, *inputs)` for every block (diffusers'
`enable_gradient_checkpointing`); here it is given a function that applies the block's policy. Only activations are ever
moved or dropped, never parameters.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from flowshard.config import ActivationPolicy, MemoryConfig
from flowshard.device import CopyStream, host_tensor
from flowshard.errors import UserError
from flowshard.memory.overlap import BlockInputs, OverlappingOffload
from flowshard.memory.storages import storage_id

_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "npu::npu_fusion_attention",
    "flowshard::sequence_attention",
)
"""The operators whose results `selective` keeps; those that this build of torch has."""


def block_policies(memory: MemoryConfig, blocks: int) -> list[ActivationPolicy]:
    """The policy of each block in the order of execution.

    Raises:
        UserError: more blocks are named than the model has.
    """
    asked = memory.activations
    if isinstance(asked, str):
        assert asked != "auto"  # noqa: S101 - chosen elsewhere
        return [asked] * blocks
    policies: list[ActivationPolicy] = [policy for policy, count in asked.items() for _ in range(count)]
    if len(policies) > blocks:
        raise UserError(
            f"memory.activations: names {len(policies)} blocks, the model has {blocks}; lower the counts in {asked}"
        )
    return policies + ["keep"] * (blocks - len(policies))


def apply_activation_policies(
    model: Any,
    blocks: Sequence[torch.nn.Module],
    policies: Sequence[ActivationPolicy],
    *,
    partitioned: bool,
    host_memory: Callable[[], AbstractContextManager[Any]] = nullcontext,
    overlap: CopyStream | None = None,
    compiled: bool = False,
) -> None:
    """Give every block its policy.

    Args:
        model: the diffusers model that the blocks belong to.
        blocks: all of them, in the order of execution.
        policies: as many.
        partitioned: whether DeepSpeed's ZeRO-3 empties parameters between their uses.
        host_memory: entered while `offload` allocates host memory, for those who count memory.
        overlap: makes the copies of `offload`, beside the computation; without it they take their turn in it.
        compiled: whether `compile_blocks` follows, which makes `selective` a part of the code that it compiles.
    """
    if all(policy == "keep" for policy in policies):
        return
    by_block = dict(zip(map(id, blocks), policies, strict=True))
    caller = PolicyCaller(
        lambda block: by_block[id(block)],
        partitioned=partitioned,
        host_memory=host_memory,
        overlap=overlap,
        compiled=compiled,
    )
    model.enable_gradient_checkpointing(caller)


class PolicyCaller:
    """Calls blocks so that each keeps what its policy says."""

    def __init__(
        self,
        policy_of: Callable[[torch.nn.Module], ActivationPolicy],
        *,
        partitioned: bool,
        host_memory: Callable[[], AbstractContextManager[Any]] = nullcontext,
        overlap: CopyStream | None = None,
        compiled: bool = False,
    ) -> None:
        """Take the policy of a block from `policy_of`; for the others see `apply_activation_policies`."""
        self._policy_of, self._compiled = policy_of, compiled
        # Under ZeRO-3 a frozen one-dimensional weight that the recomputation sees has been emptied again when torch
        # compares it with what it saw in the forward pass (deepspeed < 0.19.3); the values are right all the same.
        self._options: dict[str, Any] = {"determinism_check": "none"} if partitioned else {}
        self.offload = InputOffload(host_memory, overlap)

    def __call__(self, block: torch.nn.Module, *inputs: Any) -> Any:
        policy = self._policy_of(block)
        if policy == "keep" or (policy == "selective" and self._compiled):
            return block(*inputs)
        kept: AbstractContextManager[Any] = self.offload.of(inputs) if policy == "offload" else nullcontext()
        selective: dict[str, Any] = {"context_fn": _keep_attention} if policy == "selective" else {}
        with kept:
            return checkpoint(
                block.__call__, *inputs, use_reentrant=False, preserve_rng_state=False, **self._options, **selective
            )


def _keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a block's forward pass and of its recomputation.

    torch has such contexts too, but they take account of every operator. An engine that gathers parameters runs some in
    the recomputation that it did not run before, which they refuse.
    """
    results: deque[Any] = deque()
    return _KeepAttention(results), _ReuseAttention(results)


class _KeepAttention(TorchDispatchMode):
    """Keeps what attention operators return, in order."""

    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_attention(func):
            # Without the history that autograd is about to give to the result.
            self._results.append(tree_map_only(torch.Tensor, torch.Tensor.detach, result))
        return result


class _ReuseAttention(TorchDispatchMode):
    """Returns what was kept in place of running attention again, and lets go of it."""

    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._results.popleft() if is_attention(func) else func(*args, **(kwargs or {}))


def is_attention(operator: Any) -> bool:
    """Whether a dispatched operator is attention."""
    return isinstance(operator, torch._ops.OpOverload) and operator.name().split(".")[0] in _ATTENTION


class InputOffload:
    """Moves what a block got from the block before it to host memory until the backward pass.

    Inputs that all blocks share (text, timestep, rotary tables) stay where they are: they are kept once anyway.
    """

    def __init__(
        self,
        host_memory: Callable[[], AbstractContextManager[Any]] = nullcontext,
        overlap: CopyStream | None = None,
    ) -> None:
        """Prepare.

        Args:
            host_memory: is entered while host memory is allocated.
            overlap: makes the copies beside the computation.
        """
        self._host_memory = host_memory
        self._overlapping = None if overlap is None else OverlappingOffload(overlap, host_memory)
        self._earlier: set[int] = set()
        self.offloaded_bytes = 0
        """Bytes copied to host memory so far."""

    def of(self, inputs: Sequence[Any]) -> AbstractContextManager[Any]:
        """The context in which a block is called with these inputs."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        own = {storage_id(tensor) for tensor in tensors} - self._earlier
        self._earlier = {storage_id(tensor) for tensor in tensors}

        pack, unpack = self._in_turn() if self._overlapping is None else self._beside(self._overlapping)

        def keep_or_pack(tensor: torch.Tensor) -> Any:
            if storage_id(tensor) not in own:
                return tensor
            self.offloaded_bytes += tensor.nbytes
            return pack(tensor)

        def unpack_or_kept(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else unpack(*packed)

        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(keep_or_pack, unpack_or_kept)
        return hooks

    def _in_turn(self) -> tuple[Callable[[torch.Tensor], Any], Callable[..., torch.Tensor]]:
        """Copies whose turn comes where the computation has got to."""

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
            with self._host_memory():
                host = host_tensor(tensor.shape, tensor.dtype, tensor.device)
            return host.copy_(tensor, non_blocking=True), tensor.device

        def unpack(host: torch.Tensor, device: torch.device) -> torch.Tensor:
            return host.to(device, non_blocking=True)

        return pack, unpack

    def _beside(
        self, overlapping: OverlappingOffload
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[..., torch.Tensor]]:
        inputs = overlapping.block()

        def pack(tensor: torch.Tensor) -> tuple[BlockInputs, int, torch.device]:
            return inputs, overlapping.save(inputs, tensor), tensor.device

        return pack, overlapping.load
