"""Runs all cases, those of one number of processes in one launch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowshard.config import Config
from flowshard.config_file import dump_config
from flowshard.errors import RunError
from flowshard.parity.cases import Case
from flowshard.parity.faults import parse_fault

_LAST_LINES = 40
_NO_BACKWARD = "autograd kernel was not registered"
"""Part of torch's warning about it; gradients are then silently wrong."""


def trace_cases(
    cases: Mapping[Case, Config], folder: Path, *, fault: str | None, probe: bool = False
) -> dict[Case, Path]:
    """Run every case and return the folder of its trace.

    Args:
        cases: with their checked configs.
        folder: for configs, traces and logs.
        fault: a deliberate fault such as `noise@1`, in all cases but the first.
        probe: whether to record the outputs of all modules for one sample, and their gradients.

    Raises:
        RunError: a run failed; the message holds the end of its output.
    """
    traces: dict[Case, Path] = {}
    by_count: dict[int, list[Case]] = {}
    reference = next(iter(cases))
    hooked = probe or (fault is not None and parse_fault(fault).module is not None)
    for number, (case, config) in enumerate(cases.items()):
        traces[case] = folder / f"trace-{number}"
        traces[case].mkdir(parents=True)
        if hooked:  # what is inside of compiled code calls no hooks
            memory = config.memory.model_copy(update={"compile": False})
            config = config.model_copy(update={"memory": memory})
        (traces[case] / "config.yaml").write_text(dump_config(config, {}), encoding="utf-8")
        by_count.setdefault(case.processes, []).append(case)
    for count, members in by_count.items():
        job = folder / f"job-{count}.json"
        entries = [
            {
                "config": str(traces[case] / "config.yaml"),
                "trace": str(traces[case]),
                "fault": None if case is reference else fault,
            }
            for case in members
        ]
        job.write_text(json.dumps({"cases": entries, "probe": probe}), encoding="utf-8")
        _launch(count, ["flowshard.parity.trace", str(job)], folder / f"job-{count}.log", members)
    return traces


def _launch(count: int, module: Sequence[str], log: Path, members: Sequence[Case]) -> None:
    command = [sys.executable, "-m"]
    if count > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(  # noqa: S603
            [*command, *module], stdout=stream, stderr=subprocess.STDOUT, env=environment, check=False
        )
    output = log.read_text(encoding="utf-8", errors="replace")
    labels = ", ".join(case.label for case in members)
    if _NO_BACKWARD in output:
        raise RunError(f"{labels}: a collective without a backward pass was part of the graph:\n{output[-2000:]}")
    if done.returncode != 0:
        lines = output.splitlines()
        # The launcher's own traceback comes last and says nothing of the cause.
        own = [line for line in lines if line.startswith("[rank") or "flowshard: error" in line]
        end = "\n".join((own or lines)[-_LAST_LINES:])
        raise RunError(f"the run of {labels} failed with status {done.returncode}; the end of its output:\n{end}")
