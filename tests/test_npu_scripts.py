"""The scripts for Ascend NPUs under DiffSynth-Studio's names: what each starts."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowshard.compat.arguments import parse
from flowshard.compat.options import SCRIPTS
from tests.conftest import REPOSITORY
from tests.recipes import calls_of

NAMES = {
    "wanvideo": ("Wan2.1-T2V-14B", "Wan2.2-T2V-A14B", "Wan2.2-VACE-Fun-A14B"),
    "qwen_image": ("Qwen-Image-LoRA", "Qwen-Image-Edit-2509-LoRA", "Qwen-Image-Edit-2509"),
    "flux": ("FLUX.1-dev", "FLUX.1-Kontext-dev"),
    "flux2": ("FLUX.2-dev-Lora", "FLUX.2-klein-9B"),
    "z_image": ("Z-Image-Turbo",),
}
"""Of the scripts in https://github.com/modelscope/DiffSynth-Studio, examples/*/model_training/special/npu_training."""
SPLIT = ("Qwen-Image-LoRA", "Qwen-Image-Edit-2509-LoRA", "FLUX.2-dev-Lora")
"""Scripts that encode all samples first."""
TWO = ("Wan2.2-T2V-A14B", "Wan2.2-VACE-Fun-A14B")
"""Scripts that train two transformers."""
CASES = [(folder, name) for folder, names in NAMES.items() for name in names]


def _options(folder: str, arguments: list[str]) -> dict[str, Any]:
    """The options that are given to a training script, by name; what is not honoured fails."""
    script = next(script for script in SCRIPTS.values() if script.folder == folder)
    options = parse(script, arguments)
    return {name: options[name] for name in options.given}


def test_the_scripts_have_their_names() -> None:
    found = {
        folder: {file.name for file in (REPOSITORY / "examples" / folder).glob("model_training/special/npu_training/*")}
        for folder in NAMES
    }
    assert found == {folder: {f"{name}-NPU.sh" for name in names} for folder, names in NAMES.items()}


@pytest.mark.parametrize(("folder", "name"), CASES, ids=[name for _, name in CASES])
def test_script_starts_training(folder: str, name: str, tmp_path: Path) -> None:
    script = REPOSITORY / "examples" / folder / "model_training" / "special" / "npu_training" / f"{name}-NPU.sh"
    assert os.access(script, os.X_OK)
    download, *started = calls_of(script, tmp_path, "--num_epochs", "7", noted=["CPU_AFFINITY_CONF"])
    assert download[:5] == ["modelscope", "1", "download", "--dataset", "DiffSynth-Studio/diffsynth_example_dataset"]
    assert len(started) == 1 + (name in SPLIT or name in TWO)
    every = []
    for number, (program, affinity, command, *arguments) in enumerate(started):
        assert (program, affinity, command) == ("accelerate", "1", "launch")
        place = arguments.index(f"examples/{folder}/model_training/train.py")
        launcher, options = arguments[:place], _options(folder, arguments[place + 1 :])
        every.append(options)
        assert options["num_epochs"] == 7, "options that are given to the script count"
        alone = (name.startswith("Qwen") and "lora_rank" in options) or options.get("task") == "sft:data_process"
        assert bool(launcher) != alone, "whatever is trained whole, or is larger than one device, takes ZeRO-3"
        if launcher:
            option, file = launcher
            assert option == "--config_file"
            settings = yaml.safe_load((REPOSITORY / file).read_text(encoding="utf-8"))
            assert settings["deepspeed_config"]["zero_stage"] == 3
        assert [key in options for key in ("lora_base_model", "trainable_models")] == [name in SPLIT, name not in SPLIT]
        models = str(options["model_id_with_origin_paths"]).split(",")
        assert all(model.count("/") >= 1 and model.count(":") == 1 for model in models)
        if name in SPLIT:
            assert options["task"] == ("sft:data_process", "sft:train")[number]
    if name in SPLIT:
        assert every[1]["dataset_base_path"] == every[0]["output_path"]
    if name in TWO:
        assert every[0]["max_timestep_boundary"] == every[1]["min_timestep_boundary"]
    assert len({options["output_path"] for options in every}) == len(every)
