"""The recipe scripts and launcher files under DiffSynth-Studio's names."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from flowshard.compat.arguments import parse
from flowshard.compat.mapping import translate
from flowshard.compat.model_files import DEFAULT_PARTS
from flowshard.compat.options import SCRIPTS
from flowshard.config_file import load_config
from flowshard.families import all_families, find_variant
from flowshard.parallel.deepspeed_config import deepspeed_config
from flowshard.parallel.layout import resolve_layout
from tests.conftest import REPOSITORY
from tests.launch import environment, python
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
    script = next(one for one in SCRIPTS.values() if one.folder == series)
    for command in started:
        assert command.script == script.path
        parse(script, command.arguments)  # refuses what is unknown or not honoured
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


def _lay_out(models: str, base: Path, sources: list[Path]) -> None:
    """Put a tiny model's files where those of repositories are looked for."""
    for model in models.split(","):
        repository, _, pattern = model.partition(":")
        source = next(one for one in sources if list(one.glob(pattern)))
        top = [one.relative_to(source).parts[0] for one in source.glob(pattern)]
        (base / repository).mkdir(parents=True, exist_ok=True)
        for name in {*top, *(one.name for one in source.glob("*.json"))}:
            if not (base / repository / name).exists():
                (base / repository / name).symlink_to(source / name)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        pytest.param(variant, name, id=variant, marks=[] if variant == "z-image" else pytest.mark.slow)
        for variant, name in _names().items()
    ],
)
def test_recipe_is_read_as_a_config_of_its_variant(
    variant: str,
    name: str,
    originals: Callable[[str], Path],
    tiny_models: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With tiny files where the models are looked for, and under the launcher that the recipe names."""
    monkeypatch.setenv("DIFFSYNTH_MODEL_BASE_PATH", str(tmp_path / "models"))
    monkeypatch.setenv("DIFFSYNTH_SKIP_DOWNLOAD", "true")
    family, row = find_variant(variant, option="")
    script = SCRIPTS[family.name]
    default = {part: f"{repository}:{folder}" for part, (_, repository, folder) in DEFAULT_PARTS[family.name].items()}
    for method in ("lora", "full"):
        started, _ = dry_run(EXAMPLES / name.format(method), tmp_path)
        for command in started:
            sources = [originals(variant), tiny_models(variant)]
            models = command.option("model_id_with_origin_paths") or ""
            parts = [one for part, one in default.items() if part in family.original_parts]
            _lay_out(
                ",".join([models, *parts, *filter(None, [command.option("tokenizer_path")])]),
                tmp_path / "models",
                sources,
            )
            variables = {"WORLD_SIZE": "1"}
            if command.launcher:
                variables = launcher_environment(REPOSITORY / command.launcher[1], monkeypatch)
            translation = translate(script, parse(script, command.arguments), variables)
            tree = translation.tree
            assert tree["model"]["variant"] == row.name
            assert (tree["model"].get("expert") is not None) == (row.experts is not None)
            if not translation.encode:
                assert tree["train"]["method"] == method
                assert tree["train"]["global_batch"] == int(variables["WORLD_SIZE"])
            if row.experts is not None:
                low, high = tree["objective"]["index_range"]
                assert (low == 0.0) == (tree["model"]["expert"] == "high")
                assert high in (1.0, low + high)
            missing = [note.partition("has no ")[2] for note in translation.notes if note.startswith("--lora_target")]
            unknown = {one for note in missing for one in note.split(", ")}
            tiny = {one for one in unknown if one.startswith("single_transformer_blocks.")}  # which has fewer blocks
            assert unknown == tiny, "targets that mean no layer"


@pytest.mark.slow
def test_recipe_trains_in_the_background(originals: Callable[[str], Path], clips: Path, tmp_path: Path) -> None:
    """As the documentation starts it, with a tiny model in the place of the real one, and options added."""
    sources = [originals("wan2.1-t2v-1.3b")]
    recipe = EXAMPLES / "wanvideo/model_training/lora/Wan2.1-T2V-1.3B.sh"
    started, _ = dry_run(recipe, tmp_path)
    _lay_out(
        f"{started[0].option('model_id_with_origin_paths')},Wan-AI/Wan2.1-T2V-1.3B:google/umt5-xxl",
        tmp_path / "models",
        sources,
    )
    output, log = tmp_path / "output", tmp_path / "wan.log"
    options = "--height 32 --width 32 --num_frames 5 --dataset_repeat 1 --num_epochs 2 --enable_csv_log"
    line = f"nohup bash {recipe.relative_to(REPOSITORY)} {options} --output_path {output} > {log} 2>&1 & wait $!"
    variables = environment(
        DATASET=str(clips),
        DIFFSYNTH_MODEL_BASE_PATH=str(tmp_path / "models"),
        DIFFSYNTH_SKIP_DOWNLOAD="true",
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    done = subprocess.run(["bash", "-c", line], cwd=REPOSITORY, env=variables, check=False, timeout=600)
    assert done.returncode == 0, log.read_text(encoding="utf-8")[-3000:]
    assert {"epoch-0.safetensors", "epoch-1.safetensors", "loss.csv"} <= {file.name for file in output.iterdir()}
    assert len((output / "loss.csv").read_text().splitlines()) == 1 + 2 * 5
    with safe_open(output / "epoch-1.safetensors", framework="pt") as file:
        names = set(file.keys())
    layers = [*(f"{a}.{p}" for a in ("self_attn", "cross_attn") for p in "qkvo"), "ffn.0", "ffn.2"]
    assert names == {
        f"blocks.{block}.{layer}.lora_{factor}.default.weight"
        for block in range(3)
        for layer in layers
        for factor in "AB"
    }


@pytest.mark.slow
def test_launcher_file_for_little_memory_trains(
    tiny_models: Callable[[str], Path], clips: Path, tmp_path: Path
) -> None:
    """With the DeepSpeed file that it names, by its place in the repository."""
    launch = ["-m", "accelerate.commands.launch", "--config_file", f"examples/{SPECIAL}"]
    own = [f"model.path={tiny_models('qwen-image')}", f"output={tmp_path / 'run'}", "train.steps=1"]
    size = ["data.height=32", "data.width=32", "train.global_batch=1"]
    done = python([*launch, "-m", "flowshard", "train", "examples/qwen_image_lora.yaml", *own, *size])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "layout      zero3, one process" in done.stdout


@pytest.mark.parametrize("file", LAUNCHERS, ids=name_of)
def test_launcher_file_asks_for_what_its_name_says(
    file: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = launcher_environment(file, monkeypatch)
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
    layout = resolve_layout(read, variables)
    zero = deepspeed_config(read, layout)["zero_optimization"]
    low_memory = "low_vram_training" in file.parts
    assert layout.world == (1 if low_memory else 8)
    assert layout.strategy == ("zero3" if "zero3" in file.stem else "zero2")
    assert zero.get("offload_optimizer", {}).get("device") == ("cpu" if on_host or low_memory else None)
    assert zero.get("offload_param", {}).get("device") == ("cpu" if low_memory else None)
