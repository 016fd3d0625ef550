"""`flowshard migrate`: the config that does what a command line of DiffSynth-Studio's scripts does. Needs no torch."""

from collections.abc import Sequence
from typing import Any

import yaml

from flowshard.compat.arguments import in_their_words, parse
from flowshard.compat.command_line import Command, read_command
from flowshard.compat.mapping import Translation, translate
from flowshard.compat.wan_t2v import translate as translate_earlier
from flowshard.compat.wan_t2v_options import EARLIER
from flowshard.config_file import apply_override
from flowshard.errors import UserError
from flowshard.parallel.launcher import launcher_deepspeed_file, launcher_strategy


def migrate(words: Sequence[str]) -> str:
    """The YAML of a command line, with how to run it as comments.

    Args:
        words: the command line, launcher included.

    Raises:
        UserError: it starts no script that is known, or means something that is not honoured.
    """
    command = read_command(words)
    options = parse(command.script, command.arguments)
    try:
        if command.script is EARLIER:
            translation = translate_earlier(options, command.environment)
        else:
            translation = translate(command.script, options, command.environment)
        tree = translation.tree
        for override in translation.overrides:
            apply_override(tree, override)
        _add_launcher(tree, command)
        Translation(tree, [], translation.encode).config()
    except UserError as error:
        raise UserError(in_their_words(str(error), options)) from None
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    return "".join(f"# {line}\n" for line in _comments(command, translation)) + text


def _add_launcher(tree: dict[str, Any], command: Command) -> None:
    """What the launcher's config asks for, as the config of a run that torchrun starts."""
    layout = {**tree.get("layout", {})}
    strategy = launcher_strategy(command.environment)
    if strategy is not None:
        layout.setdefault("strategy", strategy)
    file = launcher_deepspeed_file(command.environment)
    if file is not None:
        layout.setdefault("deepspeed", file)
    if layout:
        tree["layout"] = layout


def _comments(command: Command, translation: Translation) -> list[str]:
    world = int(command.environment["WORLD_SIZE"])
    verb = "cache" if translation.encode else "train"
    start = "flowshard" if world == 1 else f"torchrun --nproc-per-node {world} -m flowshard"
    lines = [f"{start} {verb} THIS_FILE"]
    if command.assumed is not None:
        lines.append(f"{command.assumed}; train.global_batch is a sample for each")
    return lines + [f"note: {note}" for note in translation.notes]
