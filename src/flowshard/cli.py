"""The command line: one function a command, each thin. Heavy imports wait until a command needs them."""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from flowshard import __version__
from flowshard.errors import RunError, UserError

EXIT_FAULT, EXIT_USER = 1, 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 done, 1 a fault, 2 the user's input is wrong."""
    parsed = _parse(arguments)
    return exit_status(lambda: parsed.run(parsed))


def program() -> None:
    """The command line as a program of its own: run a command and end the process with its exit status."""
    end_process(main())


def end_process(status: int) -> NoReturn:
    """Leave with an exit status, also when this process failed among several."""
    if status and os.environ.get("WORLD_SIZE", "1") != "1":
        # Threads of a group that has broken apart may still hold objects of Python; while the interpreter shuts down they
        # would abort the process, and the status be lost. What there was to say has been said.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def exit_status(work: Callable[[], object]) -> int:
    """Do the work; the exit status, with the message of what the user can mend on standard error."""
    try:
        work()
    except UserError as error:
        return _fail(error, EXIT_USER)
    except RunError as error:
        return _fail(error, EXIT_FAULT)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    return 0


def _fail(error: object, status: int) -> int:
    if os.environ.get("LOCAL_RANK", "0") != "0" and status == EXIT_USER:
        return status  # the first process of each machine says what they all found
    sys.stderr.write(f"flowshard: error: {error}\n")
    return status


def _train(parsed: argparse.Namespace) -> None:
    from flowshard.config_file import load_config
    from flowshard.train.inputs import check_inputs

    inputs = check_inputs(load_config(parsed.config, parsed.overrides))

    from flowshard.libraries import quiet_libraries

    quiet_libraries()

    from flowshard.train.loop import run_training

    run_training(inputs)


def _cache(parsed: argparse.Namespace) -> None:
    from flowshard.config_file import load_config
    from flowshard.train.encode import check_encoding, encode_samples

    inputs = check_encoding(load_config(parsed.config, parsed.overrides))

    from flowshard.libraries import quiet_libraries

    quiet_libraries()
    encode_samples(inputs)


def _check(parsed: argparse.Namespace) -> None:
    from flowshard.train.check import check

    if min(parsed.workers or 1, parsed.processes or 1) < 1:
        raise UserError("--workers and --processes are at least 1")
    report = check(
        parsed.config, parsed.overrides, processes=parsed.processes, workers=parsed.workers, sheet=parsed.sheet
    )
    sys.stdout.write(json.dumps(report.as_json(), indent=2) if parsed.json else report.as_text())
    sys.stdout.write("\n")
    if parsed.sheet is not None and not parsed.json:
        sys.stdout.write(f"wrote {parsed.sheet}\n")
    if report.problems:
        count = len(report.problems)
        raise UserError(f"{count} problem{'s' if count > 1 else ''} found; training would fail")


def _plan(parsed: argparse.Namespace) -> None:
    from flowshard.plan.inputs import PlanOptions, check_plan

    fields = PlanOptions.__dataclass_fields__
    question = check_plan(PlanOptions(**{name: getattr(parsed, name) for name in fields}))

    from flowshard.libraries import quiet_libraries

    quiet_libraries()

    from flowshard.plan.command import make_plan
    from flowshard.plan.table import as_json, as_text

    plan = make_plan(question)
    sys.stdout.write(json.dumps(as_json(plan), indent=2) if parsed.json else as_text(plan))
    sys.stdout.write("\n")


def _generate(parsed: argparse.Namespace) -> None:
    from flowshard.generate import GenerateOptions, check_generation, generate

    fields = GenerateOptions.__dataclass_fields__
    checked = check_generation(GenerateOptions(**{name: getattr(parsed, name) for name in fields}))

    from flowshard.libraries import quiet_libraries

    quiet_libraries()
    if generate(checked):
        sys.stdout.write(f"wrote {parsed.output}\n")


def _export(parsed: argparse.Namespace) -> None:
    from flowshard.weights.convert import ExportOptions, check_export, export

    fields = ExportOptions.__dataclass_fields__
    checked = check_export(ExportOptions(**{name: getattr(parsed, name) for name in fields}))
    for path in export(checked):
        sys.stdout.write(f"wrote {path}\n")


def _parity(parsed: argparse.Namespace) -> None:
    from flowshard.parity.command import ParityOptions, parity

    fields = ParityOptions.__dataclass_fields__
    parity(ParityOptions(**{name: getattr(parsed, name) for name in fields}))


def _report(parsed: argparse.Namespace) -> None:
    from flowshard.report.command import report

    sys.stdout.write(f"wrote {report(parsed.runs, parsed.output)}\n")


def _tiny(parsed: argparse.Namespace) -> None:
    from flowshard.families import all_families, find_variant

    if parsed.list:
        for family in all_families():
            for name, variant in family.variants.items():
                sys.stdout.write(f"{name:<24} {family.name:<12} {variant.hub_id}\n")
        return
    if parsed.variant is None or parsed.directory is None:
        raise UserError("give VARIANT and DIR, or --list for the variants")
    find_variant(parsed.variant, option="VARIANT")

    from flowshard.families.tiny import write_tiny_pipeline
    from flowshard.libraries import quiet_libraries

    quiet_libraries()
    write_tiny_pipeline(parsed.variant, parsed.directory, seed=parsed.seed, form=parsed.format)
    sys.stdout.write(f"wrote {parsed.directory}\n")


def _migrate(parsed: argparse.Namespace) -> None:
    from flowshard.compat.migrate import migrate

    sys.stdout.write(migrate(parsed.command_line))


class _TrainHelp(argparse.Action):
    """Prints the command's help followed by every option of the config, taken from the schema."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show this text and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from flowshard.config_file import describe_options

        parser.print_help()
        sys.stdout.write("\n" + describe_options(_width()))
        parser.exit()


def _width() -> int:
    try:
        return min(os.get_terminal_size().columns, 120)
    except OSError:
        return 100


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command. `a.b=value` may stand after its options as well, where argparse takes nothing more."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in parsed or any(one.startswith("-") for one in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flowshard", description="Training of diffusion transformers: one run, any layout, one loss curve."
    )
    parser.add_argument("--version", action="version", version=f"flowshard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = commands.add_parser(
        "train",
        help="train a LoRA or full weights from a YAML config",
        description="Train from a YAML config. Options given as a.b=value override the file.",
        usage="flowshard train CONFIG [a.b=value ...]",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG", help="YAML file; the options below say what it may hold")
    train.add_argument("overrides", metavar="a.b=value", nargs="*", help="for example train.steps=5")
    train.add_argument("-h", "--help", action=_TrainHelp)
    train.set_defaults(run=_train)

    cache = commands.add_parser(
        "cache",
        help="encode the samples of a config, and nothing else",
        description="Encode what `flowshard train` with the same config would encode at its start. Needs the model's "
        "encoders but not its transformer, builds no training engine, and runs in as many processes as a launcher starts.",
        usage="flowshard cache CONFIG [a.b=value ...]",
    )
    cache.add_argument("config", metavar="CONFIG", help="YAML file of a run")
    cache.add_argument("overrides", metavar="a.b=value", nargs="*", help="for example data.cache=DIR")
    cache.set_defaults(run=_cache)

    check = commands.add_parser(
        "check",
        help="find everything that is wrong with a config and its data, without weights or GPU",
        description="Check the config, the layout, the files, every row and every medium, and say what the data is like. "
        "Exits with status 2 if training would fail.",
        usage="flowshard check CONFIG [a.b=value ...] [options]",
    )
    check.add_argument("config", metavar="CONFIG", help="YAML file")
    check.add_argument("overrides", metavar="a.b=value", nargs="*", help="for example data.height=480")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument("--sheet", type=Path, metavar="FILE", help="write a .png of what the model sees of each sample")
    check.add_argument("--workers", type=int, metavar="N", help="threads that decode (default: as many as processors)")
    check.add_argument("--processes", type=int, metavar="N", help="of the layout (default: the fewest that it needs)")
    check.set_defaults(run=_check)

    plan = commands.add_parser(
        "plan",
        help="say which layouts of a config fit on so many devices, and which to take, without weights or GPU",
        description="Work out memory, communication, operations and the time of a step for every layout of a config that is "
        "legal on so many devices, and recommend one. Needs neither the model's weights nor the data.",
        usage="flowshard plan CONFIG [a.b=value ...] --devices N [options]",
    )
    plan.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of a run")
    plan.add_argument("overrides", metavar="a.b=value", nargs="*", help="for example data.frames=81")
    plan.add_argument("--devices", type=int, required=True, metavar="N", help="devices of the run, over all machines")
    plan.add_argument("--nodes", type=int, default=1, metavar="M", help="machines that they are on (default: 1)")
    plan.add_argument(
        "--device",
        metavar="KIND",
        help="a100, a100-40gb, h100, h200, b200, l40s, rtx4090, 910b2, 910b3 or 910b4 (default: h100)",
    )
    plan.add_argument(
        "--device-memory", metavar="SIZE", help="of one device, for example 80GB or 64GiB (default: that of KIND)"
    )
    plan.add_argument(
        "--text-tokens", type=int, metavar="N", help="of a prompt, where they differ (default: the most there can be)"
    )
    plan.add_argument(
        "--references", type=int, metavar="N", help="reference pictures of a sample (default: 1 if the model needs one)"
    )
    plan.add_argument("--json", action="store_true", help="print all layouts as JSON")
    plan.set_defaults(run=_plan)

    generate = commands.add_parser(
        "generate",
        help="make a clip or a picture with a trained LoRA or trained weights",
        description="Make a clip (.mp4) or, for one frame, a picture (.png) through the stock diffusers pipeline.",
    )
    generate.add_argument(
        "--model", required=True, metavar="DIR", help="base model: diffusers folder, hub id, or the publisher's folder"
    )
    generate.add_argument("--variant", metavar="NAME", help="what --model is (default: recognised)")
    generate.add_argument("--lora", type=Path, metavar="FILE", help="LoRA file, checkpoint or run")
    generate.add_argument("--weights", type=Path, metavar="DIR", help="trained transformer, checkpoint or run")
    generate.add_argument("--lora-high", type=Path, metavar="FILE", help="LoRA of the transformer for high noise")
    generate.add_argument("--lora-low", type=Path, metavar="FILE", help="LoRA of the transformer for low noise")
    generate.add_argument(
        "--input",
        dest="inputs",
        action="append",
        default=[],
        metavar="COLUMN=FILE",
        help="what the model gets besides the prompt, for example input_image=first.png; may be repeated",
    )
    generate.add_argument("--extend", metavar="SPEC", help="model.extend of the run, if it had one")
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="what to show")
    generate.add_argument("--negative-prompt", default="", metavar="TEXT", help="what to avoid (default: empty)")
    generate.add_argument("--output", required=True, type=Path, metavar="FILE", help=".mp4, or .png for one frame")
    numbers: tuple[tuple[str, type, float | None, str], ...] = (
        ("--frames", int, None, "frames"),
        ("--height", int, None, "height in pixels"),
        ("--width", int, None, "width in pixels"),
        ("--steps", int, None, "denoising steps"),
        ("--guidance", float, None, "guidance scale, of the kind that the model has"),
        ("--guidance-low", float, None, "the same of the transformer for low noise of a model with two"),
        ("--fps", int, 16, "frames a second of the clip"),
        ("--seed", int, 0, "seed of the initial noise"),
        ("--sequence", int, 1, "processes, started with torchrun, that share the work"),
    )
    for flag, kind, default, text in numbers:
        shown = "the model's" if default is None else "%(default)s"
        generate.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {shown})")
    generate.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or npu, with an index if wanted (default: auto)"
    )
    generate.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights (default: %(default)s)",
    )
    generate.set_defaults(run=_generate)

    parity = commands.add_parser(
        "parity",
        help="run a config under several layouts and compare every number",
        description="Run a config for a few steps under each layout and compare samples, noise, sigma, loss, gradients "
        "and weights with the first layout. Exits with status 1, naming the first thing that differs.",
        usage="flowshard parity CONFIG [a.b=value ...] --layout A --layout B [options]",
    )
    parity.add_argument("config", metavar="CONFIG", help="YAML file")
    parity.add_argument("overrides", metavar="a.b=value", nargs="*", help="for example model.path=DIR")
    parity.add_argument(
        "--layout",
        dest="layouts",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="STRATEGY[:PROCESSES][,key=value...] with keys of layout, memory and train, for example single, ddp:2, "
        "zero3:2,activations=offload",
    )
    parity.add_argument("--steps", type=int, default=3, metavar="N", help="steps of each run (default: 3)")
    parity.add_argument(
        "--tolerance", type=float, metavar="T", help="bound of the loss (default: 1e-6 in float32, 1e-3 in bfloat16)"
    )
    parity.add_argument("--json", type=Path, metavar="FILE", help="write all differences there")
    parity.add_argument("--layers", type=int, metavar="N", help="use only the first N blocks of each kind")
    parity.add_argument(
        "--fault",
        metavar="FAULT",
        help="disturb one process on purpose, to see it found: noise@RANK, output:MODULE@RANK, gradient:MODULE@RANK",
    )
    parity.set_defaults(run=_parity)

    export = commands.add_parser(
        "export",
        help="write a trained LoRA or trained weights in another program's names",
        description="Write a LoRA, or whole weights, in the names of diffusers, of the publisher (DiffSynth-Studio reads "
        "these) or of ComfyUI. Reads all of these formats.",
    )
    export.add_argument("source", metavar="SOURCE", type=Path, help="run, checkpoint, or LoRA file")
    export.add_argument("--format", required=True, choices=("diffusers", "original", "comfyui"), help="names to write")
    export.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help=".safetensors; or a folder, see docs"
    )
    export.add_argument("--merge", action="store_true", help="add the LoRA to the weights of --model and write these")
    export.add_argument(
        "--model", metavar="DIR", help="base model: diffusers folder, hub id, or the publisher's folder"
    )
    export.add_argument(
        "--variant", metavar="NAME", help="what the LoRA was trained on, if neither run nor --model says"
    )
    export.set_defaults(run=_export)

    report = commands.add_parser(
        "report",
        help="write the numbers and samples of a run, or of several, as one page",
        description="Write one self-contained HTML page with the curves, samples and config of a run, finished or not; "
        "of several runs in the same charts, with what differs in their configs.",
    )
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="the page (default: report.html in the first folder)"
    )
    report.set_defaults(run=_report)

    migrate = commands.add_parser(
        "migrate",
        help="print the config of a command line of DiffSynth-Studio's training scripts",
        description="Print a YAML config that trains as a command line of DiffSynth-Studio's scripts does, with the same "
        "losses. The command line may begin with its launcher.",
        usage="flowshard migrate -- COMMAND LINE ...",
    )
    migrate.add_argument("command_line", metavar="COMMAND LINE", nargs="+", help="the whole command, after --")
    migrate.set_defaults(run=_migrate)

    tiny = commands.add_parser(
        "tiny",
        help="write a tiny random pipeline of a variant, to try a config",
        description=textwrap.dedent(
            "Write a complete diffusers pipeline of a variant with tiny random weights (5 to 30 MB), which the stock pipeline "
            "class loads. Use it to try a config, a launcher or a cluster before the real weights."
        ),
    )
    tiny.add_argument("variant", metavar="VARIANT", nargs="?", help="for example wan2.1-t2v-1.3b")
    tiny.add_argument("directory", metavar="DIR", nargs="?", type=Path, help="an empty or new folder")
    tiny.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights (default: 0)")
    tiny.add_argument(
        "--format", default="diffusers", choices=("diffusers", "original"), help="layout (default: %(default)s)"
    )
    tiny.add_argument("--list", action="store_true", help="list the variants")
    tiny.set_defaults(run=_tiny)
    return parser
