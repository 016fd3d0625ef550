"""The recipe scripts and launcher files under DiffSynth-Studio's names."""

from pathlib import Path

import pytest
import yaml

from flowshard.config_file import load_config
from flowshard.families import all_families
from flowshard.parallel.deepspeed_config import deepspeed_config
from flowshard.parallel.layout import resolve_layout
from tests.conftest import REPOSITORY
from tests.recipes import EXAMPLES, LAUNCHERS, RECIPES, dry_run, launcher_environment, name_of

FOLDERS = {"wan": "wanvideo", "qwen-image": "qwen_image", "flux": "flux", "flux2": "flux2", "z-image": "z_image"}
"""Series to the folder of its scripts."""
EXPECTED = {
    "flux": ["", "_zero2offload", "_zero3"],
    "flux2": ["", "_zero3"],
    "qwen_image": ["", "_zero2offload", "_zero3"],
    "wanvideo": ["_14B", "_zero3"],
    "z_image": ["", "_zero3"],
}
"""Launcher files that DiffSynth-Studio's scripts name."""
SPECIAL = "qwen_image/model_training/special/low_vram_training/deepspeed_zero3_cpuoffload.yaml"


def _names() -> dict[str, str]:
    """Every variant to the name of its recipes: that of its repository."""
    names = {}
    for family in all_families():
        for variant in family.variants.values():
            name = Path(variant.hub_id).name
            names[variant.name] = f"{FOLDERS[family.name]}/model_training/{{}}/{name.removesuffix('-Diffusers')}.sh"
    # diffusers' repositories of these have other names than the publishers'.
    names["wan2.1-flf2v-14b-720p"] = "wanvideo/model_training/{}/Wan2.1-FLF2V-14B-720P.sh"
    names["wan2.1-vace-1.3b"] = "wanvideo/model_training/{}/Wan2.1-VACE-1.3B.sh"
    names["wan2.1-vace-14b"] = "wanvideo/model_training/{}/Wan2.1-VACE-14B.sh"
    names["wan2.2-vace-fun-a14b"] = "wanvideo/model_training/{}/Wan2.2-VACE-Fun-A14B.sh"
    return names


def test_every_variant_has_its_recipes_and_every_launcher_file_is_there() -> None:
    there = {name_of(file) for file in RECIPES}
    wanted = {name.format(method) for name in _names().values() for method in ("lora", "full")}
    assert wanted <= there
    assert there - wanted == {name for name in there if "/special/" in name}
    files = [
        f"{folder}/model_training/full/accelerate_config{suffix}.yaml"
        for folder, its in EXPECTED.items()
        for suffix in its
    ]
    assert sorted([*files, SPECIAL]) == sorted(name_of(file) for file in LAUNCHERS)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_recipe_starts_training_of_its_model(recipe: Path, tmp_path: Path) -> None:
    started, downloads = dry_run(recipe, tmp_path)
    series, _, kind, *_ = recipe.relative_to(EXAMPLES).parts
    assert len(downloads) == 1
    assert downloads[0][:3] == ["download", "--dataset", "DiffSynth-Studio/diffsynth_example_dataset"]
    for command in started:
        assert command.script == f"examples/{series}/model_training/train.py"
        if command.launcher:
            option, file = command.launcher
            assert option == "--config_file"
            assert (REPOSITORY / file).is_file(), "the launcher file is not in the repository"
        models = (command.option("model_id_with_origin_paths") or "").split(",")
        assert all(model.count("/") >= 1 and model.count(":") == 1 for model in models)
        trained = [command.option(name) for name in ("lora_base_model", "trainable_models")]
        assert [one is not None for one in trained] == [kind != "full", kind == "full"]
    if kind != "special":
        own = recipe.stem
        assert any(f"/{own}:" in (command.option("model_id_with_origin_paths") or "") for command in started)
    # The folder of an own data set is neither downloaded nor looked for in another place.
    again, downloads = dry_run(recipe, tmp_path, "--num_epochs", "7", DATASET=str(tmp_path))
    assert not downloads
    assert again[0].option("dataset_base_path") == str(tmp_path)
    assert (again[0].option("dataset_metadata_path") or "").startswith(f"{tmp_path}/metadata.")
    assert {command.option("num_epochs") for command in again} == {"7"}


@pytest.mark.parametrize("file", LAUNCHERS, ids=name_of)
def test_launcher_file_asks_for_what_its_name_says(
    file: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = launcher_environment(file, monkeypatch)
    on_host = file.stem.endswith(("14B", "zero2offload"))
    config = tmp_path / "run.yaml"
    data = {"metadata": str(clips / "metadata.csv"), "height": 32, "width": 32}
    settings = {
        "output": str(tmp_path / "run"),
        "model": {"variant": "wan2.1-t2v-1.3b", "path": "models/wan"},
        "data": data,
        "train": {"steps": 1, "global_batch": 8, "clip_norm": None},
        "layout": {"offload_optimizer": on_host},
    }
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    read = load_config(config, [])
    layout = resolve_layout(read, environment)
    zero = deepspeed_config(read, layout)["zero_optimization"]
    low_memory = "low_vram_training" in file.parts
    assert layout.world == (1 if low_memory else 8)
    assert layout.strategy == ("zero3" if "zero3" in file.stem else "zero2")
    assert zero.get("offload_optimizer", {}).get("device") == ("cpu" if on_host or low_memory else None)
    assert zero.get("offload_param", {}).get("device") == ("cpu" if low_memory else None)
