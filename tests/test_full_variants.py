"""Full training of variants with other conditions than text: several processes against one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flowshard.config import Config
from flowshard.config_file import dump_config
from tests import runs
from tests.launch import torchrun
from tests.pictures import run_config
from tests.wan_variants import open_case, write_data

TinyModels = Callable[[str], Path]
CASES = {
    "wan2.1-vace-1.3b": ("layout.strategy=zero3", "memory.activations=offload"),
    "wan2.1-flf2v-14b-720p": ("layout.strategy=fsdp2", "memory.activations=recompute"),
    "flux.2-klein-base-4b": ("layout.strategy=zero3", "layout.sequence=2", "layout.ring=2"),
}
"""Each kind of conditions under a strategy; all of them under all: the slow tests of the variants."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, clips)
    return folder


@pytest.mark.slow
def test_full_training_on_two_processes_is_that_on_one(tiny_models: TinyModels, data: Path, tmp_path: Path) -> None:
    """In one launch: losses, gradient norms, and every tensor of what is saved."""
    own = ("train.method=full", "train.learning_rate=1e-5", "train.global_batch=2", "train.steps=2")

    def config(variant: str, name: str, *layout: str) -> Config:
        if variant.startswith("wan"):
            return open_case(variant, tiny_models, data).config(tmp_path / variant / name, *own, *layout)
        rows = [{"edit_image": ["clip_1.mp4"]}, {}]
        folder = tmp_path / variant
        folder.mkdir(exist_ok=True)
        return run_config(tiny_models(variant), variant, folder / name, rows, *own, *layout)

    expected = {variant: runs.run(config(variant, "single")) for variant in CASES}
    divided = {variant: config(variant, "divided", *layout) for variant, layout in CASES.items()}
    jobs = []
    for variant, one in divided.items():
        file = tmp_path / f"{variant}.yaml"
        file.write_text(dump_config(one, {}))
        jobs.append({"config": str(file), "stop_after": None})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(2, ["tests.workers.runs", str(tmp_path / "jobs.json")])
    assert done.returncode == 0, done.stderr[-3000:]
    for variant, one in divided.items():
        lines = [runs.metrics(other) for other in (one, config(variant, "single"))]
        for key in ("loss", "grad_norm"):
            ours, theirs = ([line[key] for line in own] for own in lines)
            assert ours == pytest.approx(theirs, rel=1e-5 if key == "grad_norm" else 1e-6), variant
        checkpoint = Path(one.output, "checkpoints", expected[variant].name)
        assert runs.distance(runs.weights(checkpoint), runs.weights(expected[variant])) < 1e-6, variant
