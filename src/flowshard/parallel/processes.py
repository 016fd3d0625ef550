"""The processes of a run: how they find each other, agree, wait and end together."""

import copy
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from flowshard.device import claim, collective_backend, resolve_device
from flowshard.errors import RunError, UserError
from flowshard.parallel.layout import Layout

dist: Any = torch.distributed
"""Typed loosely, as torch does not declare what it exports here."""
_POLL_SECONDS = 0.2
T = TypeVar("T")


class Processes:
    """This process among its peers. With one process everything here is a no-op."""

    def __init__(self, layout: Layout, device_name: str, *, timeout_minutes: float) -> None:
        """Join the group that the launcher set up.

        Args:
            layout: with rank and world size.
            device_name: `device` of the config; without an index each process takes the one of its local rank.
            timeout_minutes: after which a collective that a peer does not join is an error.

        Raises:
            UserError: there is no such device.
        """
        if layout.world > 1 and device_name != "cpu" and ":" not in device_name:
            kind = resolve_device(device_name).type
            device_name = kind if kind == "cpu" else f"{kind}:{layout.local_rank}"
        self.layout = layout
        self.device = resolve_device(device_name)
        claim(self.device)
        self._store: Any = None
        self._watch: threading.Thread | None = None
        self._ended = threading.Event()
        self._waits: dict[str, int] = {}
        if layout.world == 1 and layout.strategy == "single":
            return
        os.environ.setdefault("LOCAL_RANK", str(layout.local_rank))  # DeepSpeed reads it
        timeout = timedelta(minutes=timeout_minutes)
        if layout.world == 1:  # a sharding strategy on one process, started without a launcher
            store: Any = dist.HashStore()
        else:
            store = next(dist.rendezvous("env://", timeout=timeout))[0]
        # torchrun may keep its store when it restarts the group, and with it what the last one wrote there.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(
            collective_backend(self.device),
            store=dist.PrefixStore("collectives", store),
            rank=layout.rank,
            world_size=layout.world,
            timeout=timeout,
        )
        if layout.world > 1:
            self._store = dist.PrefixStore("flowshard", store)
            self._watch = threading.Thread(target=self._end_with_peers, name="peers", daemon=True)
            self._watch.start()

    def with_layout(self, layout: Layout) -> "Processes":
        """The same processes for another run of theirs, under another layout of as many."""
        assert layout.world == self.layout.world  # noqa: S101
        other = copy.copy(self)
        other.layout = layout
        return other

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints, and creates and deletes files."""
        return self.layout.rank == 0

    def say(self, text: str | None) -> None:
        """Print a line for the user, once."""
        if text and self.is_main:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.layout.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, value: T | None) -> T:
        """What the main process passed in; for small objects."""
        box: list[Any] = [value]
        if self.layout.world > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        result: T = box[0]
        return result

    def on_main(self, action: Callable[[], T]) -> T:
        """Run an action on the main process; its result, or its exception, comes to all.

        Only for what takes seconds: the others wait inside a collective.
        """
        outcome: tuple[T | None, Exception | None] | None = None
        if self.is_main:
            try:
                outcome = (action(), None)
            except Exception as error:
                outcome = (None, error)
        value, failure = self.share(outcome)
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def on_main_for_long(self, name: str, action: Callable[[], object]) -> None:
        """Run an action on the main process, however long it takes; its exception comes to all.

        Args:
            name: of the wait, as in `wait_for_all`.
            action: what to do.
        """
        failure: Exception | None = None
        if self.is_main:
            try:
                action()
            except Exception as error:
                failure = error
        self.wait_for_all(name)
        self.on_main(lambda: _raise(failure))

    def wait_for_all(self, name: str) -> None:
        """Return when all processes have come here, however long it takes: no collective is waiting meanwhile."""
        if self._store is None:
            return
        self._waits[name] = self._waits.get(name, 0) + 1
        key = f"wait/{name}/{self._waits[name]}"
        self._store.add(key, 1)
        while self._store.add(key, 0) < self.layout.world:
            time.sleep(_POLL_SECONDS)

    def fail(self, message: str) -> None:
        """Tell the peers that this process ends, so that they end too instead of waiting for it."""
        if self._store is not None and not self._ended.is_set():
            self._ended.set()
            try:
                self._store.set("failed", f"rank {self.layout.rank}: {message}")
            except RuntimeError:  # the store went with the main process, which everybody notices
                return

    def close(self) -> None:
        """Leave the group in good order."""
        self._ended.set()
        if self._watch is not None:
            # Inside a call of the store when the interpreter ends, it would take the whole process down.
            self._watch.join()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _end_with_peers(self) -> None:
        """In a thread of its own: end this process as soon as a peer has failed, even inside a collective."""
        while not self._ended.wait(1.0):
            try:
                failed = self._store.check(["failed"])
            except RuntimeError:  # the process that held the store is gone
                return
            if failed and not self._ended.is_set():
                os._exit(1)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def run_together(
    layout: Layout, work: Callable[[Processes], T], *, device_name: str, timeout_minutes: float = 30.0
) -> T:
    """Join the group, work, and leave it; if this process fails, its peers are told and end as well.

    Args:
        layout: with rank and world size.
        work: what to do.
        device_name: `device` of the config.
        timeout_minutes: after which a collective that a peer does not join is an error.

    Raises:
        RunError: another process was lost.
    """
    processes = Processes(layout, device_name, timeout_minutes=timeout_minutes)
    try:
        result = work(processes)
    except Exception as error:
        processes.fail(str(error))
        if isinstance(error, UserError) and layout.local_rank != 0:
            # Found at work, so perhaps by this process alone; the command line leaves other mistakes to the first one.
            raise RunError(f"rank {layout.rank}: {error}") from None
        if isinstance(error, RuntimeError) and layout.world > 1 and _is_lost_contact(error):
            reason = " ".join(str(error).split())[:300]
            raise RunError(
                f"rank {layout.rank}: the contact to another process was lost ({reason}); its own message says why"
            ) from None
        raise
    finally:
        processes.close()
    return result


def _is_lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because a peer ended or did not come in time."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("connection closed", "connection reset", "timed out", "broken pipe", "gloo"))
