"""Starting several processes from a test."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conftest import REPOSITORY


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def environment(**more: str) -> dict[str, str]:
    """For processes that share a small machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def python(
    arguments: Sequence[str],
    *,
    folder: Path = REPOSITORY,
    more: Mapping[str, str] | None = None,
    timeout: float | None = 300,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a folder and wait for it; a timeout ends what it started as well."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(**(more or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=timeout)
        except BaseException:  # an interrupted test leaves nothing behind either
            process.terminate()  # on which torchrun ends its workers, which are in sessions of their own
            try:
                process.wait(30)
            finally:
                process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)


def torchrun(
    processes: int, module: Sequence[str], *, more: Mapping[str, str] | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a module in several processes on this machine and wait for them."""
    done = python(["-m", *local_agent(processes), "-m", *module], more=more, timeout=timeout)
    # torch's warning about a collective without a backward pass in the graph.
    assert "autograd kernel was not registered" not in done.stdout + done.stderr
    return done


def local_agent(processes: int) -> list[str]:
    """torchrun as a module, with its options."""
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]


def start(arguments: Sequence[str], log: Path, **more: str) -> "subprocess.Popen[str]":
    """Start `python -m ...` in the background; everything it prints goes to `log`."""
    with log.open("w", encoding="utf-8") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=REPOSITORY,
            env=environment(**more),
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
        )
