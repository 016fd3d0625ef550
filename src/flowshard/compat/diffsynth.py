"""DiffSynth-Studio's training scripts: their command lines, run by us."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from flowshard.cli import end_process, exit_status
from flowshard.compat.arguments import Arguments, in_their_words, parse
from flowshard.compat.mapping import Translation, translate
from flowshard.compat.options import SCRIPTS
from flowshard.errors import UserError


def program(series: str) -> NoReturn:
    """A script as a program of its own: train, and end the process with its exit status."""
    end_process(main(series))


def main(series: str, arguments: Sequence[str] | None = None) -> int:
    """Do what a command line of DiffSynth-Studio's script for a series asks for.

    Args:
        series: whose script it is: `wan`, `qwen-image`, `flux`, `flux2` or `z-image`.
        arguments: the options; those of the process if None.

    Returns:
        The exit status, as of `flowshard`.
    """
    return exit_status(lambda: _run(series, sys.argv[1:] if arguments is None else arguments))


def _run(series: str, arguments: Sequence[str]) -> None:
    script = SCRIPTS[series]
    options = parse(script, arguments)
    try:
        run(translate(script, options), options)
    except UserError as error:
        raise UserError(in_their_words(str(error), options)) from None


def run(translation: Translation, options: Arguments) -> None:
    """Encode or train as a translated command line says, and write what DiffSynth-Studio's script would.

    Raises:
        UserError: the input is wrong.
    """
    if translation.encode:
        from flowshard.train.encode import check_encoding, encode_samples

        encoding = check_encoding(translation.config())
        _say(translation.notes, encoding.layout.rank)
        encode_samples(encoding)
        return
    from flowshard.train.inputs import check_inputs

    inputs = check_inputs(translation.config())
    _say(translation.notes, inputs.layout.rank)

    from flowshard.libraries import quiet_libraries

    quiet_libraries()

    from flowshard.compat.outputs import Outputs
    from flowshard.train.loop import run_training

    run_training(inputs, Outputs(inputs, options, epoch=translation.epoch))


def _say(notes: Sequence[str], rank: int) -> None:
    if rank == 0:
        sys.stdout.write("".join(f"note: {note}\n" for note in notes))
