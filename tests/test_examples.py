"""The examples: each starts as it is, with a tiny model in the place of the real one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flowshard.config_file import load_config
from flowshard.families import find_variant
from tests import runs
from tests.conftest import REPOSITORY
from tests.launch import python
from tests.test_families import BASES

SERIES = dict(zip(("wan", "qwen_image", "flux", "flux2", "z_image"), BASES, strict=True))
"""Name of an example to its variant."""
FOLDERS = {"wan": "wanvideo"}
"""Folder of launcher files, where it has another name."""
SMALL = ["data.height=32", "data.width=32", "train.steps=1"]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("series", SERIES)
def test_example_trains(tiny_models: Callable[[str], Path], tmp_path: Path, series: str, method: str) -> None:
    size = [*SMALL, "train.global_batch=1", "layout.strategy=single", *(["data.frames=5"] if series == "wan" else [])]
    model = [f"model.path={tiny_models(SERIES[series])}", f"output={tmp_path / 'run'}"]
    file = REPOSITORY / "examples" / f"{series}_{method}.yaml"
    checkpoint = runs.run(load_config(file, [*model, *size]))
    saved = checkpoint / ("lora.safetensors" if method == "lora" else "transformer/config.json")
    assert saved.is_file()


@pytest.mark.parametrize("series", SERIES)
def test_example_names_the_published_model_and_fits_eight_devices(series: str) -> None:
    for method in ("lora", "full"):
        config = load_config(REPOSITORY / "examples" / f"{series}_{method}.yaml")
        assert config.train.method == method
        assert config.model.variant == SERIES[series]
        assert config.model.path == find_variant(SERIES[series], option="")[1].hub_id
        assert config.model.dtype == "bfloat16"
        assert config.train.global_batch % (8 if series != "wan" else 4) == 0


@pytest.mark.parametrize(
    "series", [pytest.param(name, marks=[] if name == "flux2" else pytest.mark.slow) for name in SERIES]
)
def test_launcher_file_starts_zero3(tiny_models: Callable[[str], Path], tmp_path: Path, series: str) -> None:
    """The file as it is, but for the number of devices."""

    folder = REPOSITORY / "examples" / FOLDERS.get(series, series) / "model_training" / "full"
    settings = yaml.safe_load((folder / "accelerate_config_zero3.yaml").read_text())
    assert settings["num_processes"] == 8
    file = tmp_path / "launcher.yaml"
    file.write_text(yaml.safe_dump({**settings, "num_processes": 2}))
    size = [*SMALL, "train.global_batch=2", *(["data.frames=5"] if series == "wan" else [])]
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(file),
        "-m",
        "flowshard",
        "train",
    ]
    own = [f"model.path={tiny_models(SERIES[series])}", f"output={tmp_path / 'run'}"]
    done = python([*launch, f"examples/{series}_full.yaml", *own, *size])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "layout      zero3, 2 processes" in done.stdout
