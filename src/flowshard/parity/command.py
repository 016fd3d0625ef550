"""The command: run, compare, print, decide."""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flowshard.errors import RunError, UserError
from flowshard.libraries import quiet_libraries
from flowshard.parity.cases import Case, case_config, parse_case
from flowshard.parity.faults import parse_fault
from flowshard.parity.launch import trace_cases

_BOUNDS = {"float32": (1e-6, 10.0), "bfloat16": (1e-3, None), "float16": (1e-3, None)}
"""Type to (bound of the loss, bound of tensors as a multiple of it)."""
_MODULE_BOUNDS = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
"""Type to the difference of a module's output from which it counts: far above rounding."""


@dataclass(frozen=True)
class ParityOptions:
    """The options of `flowshard parity`."""

    config: str
    overrides: list[str]
    layouts: list[str]
    steps: int
    tolerance: float | None
    json: Path | None
    layers: int | None
    fault: str | None


def parity(options: ParityOptions) -> None:
    """Run the config under each layout, print the differences to the first one.

    Raises:
        UserError: config, layout or option is wrong.
        RunError: a run failed, or a difference is more than rounding; the message names the first thing that differs.
    """
    cases = [parse_case(label) for label in options.layouts]
    if len(cases) < 2:
        raise UserError("--layout: give at least two; the others are compared with the first")
    if len({case.label for case in cases}) < len(cases):
        raise UserError("--layout: one is given twice")
    _check_fault(options.fault, cases)
    if options.steps < 1:
        raise UserError(f"--steps: at least 1, not {options.steps}")
    overrides = [*options.overrides, f"train.steps={options.steps}", "train.epochs=null"]
    if options.layers is not None:
        overrides.append(f"model.layers={options.layers}")
    with tempfile.TemporaryDirectory(prefix="flowshard-parity-") as name:
        folder = Path(name)
        configs = {case: case_config(case, options.config, overrides, folder) for case in cases}
        quiet_libraries()  # takes seconds, as it imports them; a wrong option does not wait for it
        dtype = configs[cases[0]].model.dtype
        traces = trace_cases(configs, folder, fault=options.fault)
        found = _report(cases, traces, options, dtype)
        if found is not None:
            from flowshard.parity.walk import first_module

            case, text, in_model = found
            if in_model:
                pair = {cases[0]: configs[cases[0]], case: configs[case]}
                sys.stdout.write("walking through the model to where they part\n")
                walks = trace_cases(pair, folder / "walk", fault=options.fault, probe=True)
                text += f"; {first_module(walks[cases[0]], walks[case], _MODULE_BOUNDS[dtype])}"
            raise RunError(f"the layouts differ; first: {text}")
    sys.stdout.write("all layouts agree\n")


def _check_fault(text: str | None, cases: list[Case]) -> None:
    if text is None:
        return
    rank = parse_fault(text).rank
    if all(rank >= case.processes for case in cases[1:]):
        raise UserError(f"--fault: no layout after the first one has a rank {rank}")


def _report(
    cases: list[Case], traces: dict[Case, Path], options: ParityOptions, dtype: str
) -> tuple[Case, str, bool] | None:
    """Print the comparison; the first case that differs, where, and whether that is in the model and not in its input."""
    from flowshard.parity.compare import DRAWS, Bounds, compare, gradient_warnings, to_json, worst_by_quantity

    default, multiple = _BOUNDS[dtype]
    loss_bound = options.tolerance or default
    bounds = Bounds(loss_bound, None if multiple is None else loss_bound * multiple)
    reference = cases[0]
    lines = [f"reference {reference.label}, {options.steps} steps, {dtype}", ""]
    width = max(len(case.label) for case in cases)
    document: dict[str, object] = {"reference": reference.label, "layouts": {}}
    first: tuple[Case, str, bool] | None = None
    for case in cases[1:]:
        try:
            differences = compare(traces[reference], traces[case], bounds)
        except ValueError as error:
            first = first or (case, f"{case.label}: {error}", False)
            lines.append(f"{case.label:<{width}}  {error}")
            continue
        cells = []
        for quantity, one in worst_by_quantity(differences).items():
            shown = f"{one.error:.1e}" if 0 < one.error < float("inf") else ("equal" if one.error == 0 else "DIFFERS")
            cells.append(f"{quantity} {shown}" + (" (!)" if one.excessive else ""))
        lines.append(f"{case.label:<{width}}  {', '.join(cells)}")
        document["layouts"][case.label] = to_json(differences)  # type: ignore[index]
        wrong = next((one for one in differences if one.excessive), None)
        if wrong is not None and first is None:
            text = f"{case.label}: {wrong.quantity} at {wrong.place} (error {wrong.error:.1e}, bound {wrong.bound:.0e})"
            first = case, text, wrong.quantity not in DRAWS
    warnings = gradient_warnings(traces[reference])
    lines += ["", *(f"warning: {line}" for line in warnings)] if warnings else []
    document.update(first_difference=first and first[1], warnings=warnings)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2), encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return first
