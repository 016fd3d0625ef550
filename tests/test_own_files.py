"""Options that came with the command lines of others: own parts and weights, columns, checkpoints by passes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowshard.errors import UserError
from flowshard.train.encode import check_encoding
from flowshard.train.inputs import check_inputs, is_save_due
from tests import runs

TinyModels = Callable[[str], Path]


@pytest.mark.parametrize(
    ("samples", "batch", "every", "due"),
    [
        (5, 1, 1, [5, 10, 15]),
        (5, 2, 1, [3, 5, 8]),  # the step that takes the last sample of a pass
        (5, 2, 2, [5]),
        (2, 4, 1, [1, 2, 3]),  # two passes a step
        (2, 4, 3, [2, 3]),
    ],
)
def test_checkpoints_come_with_the_ends_of_passes(
    tiny: Path, clips: Path, tmp_path: Path, samples: int, batch: int, every: int, due: list[int]
) -> None:
    config = runs.config(tiny, clips, tmp_path / "run", f"train.global_batch={batch}", f"save.every_epochs={every}")
    steps = range(1, 20)
    found = [step for step in steps if is_save_due(config, samples, step)]
    assert found[: len(due)] == due


def test_columns_that_are_not_named_are_left_aside(tiny: Path, clips: Path, tmp_path: Path) -> None:
    table = tmp_path / "metadata.csv"
    table.write_text("image,video,prompt,start\nnowhere.png,clip_0.mp4,a rabbit,7\n", encoding="utf-8")
    same = (f"data.metadata={table}", f"data.root={clips}")
    with pytest.raises(UserError, match="names both a video and an image"):
        check_inputs(runs.config(tiny, clips, tmp_path / "all", *same))
    metadata = check_inputs(runs.config(tiny, clips, tmp_path / "one", *same, "data.columns=[video]")).metadata
    assert [row.media.name for row in metadata.rows] == ["clip_0.mp4"]
    assert metadata.rows[0].start == 0.0
    assert metadata.notes == (f"{table}: unused columns: image, start",)
    with pytest.raises(UserError, match=r"data.columns: .*metadata.csv has no column 'mask'; it has 'image', 'video'"):
        check_inputs(runs.config(tiny, clips, tmp_path / "none", *same, "data.columns=[video, mask]"))


def test_parts_are_taken_from_where_the_config_says(originals: TinyModels, clips: Path, tmp_path: Path) -> None:
    model = originals("wan2.1-t2v-1.3b")
    files = tmp_path / "files"
    files.mkdir()
    for file in model.iterdir():
        if file.suffix in (".safetensors", ".pth"):
            (files / file.name).symlink_to(file)
    shutil.copytree(model / "google" / "umt5-xxl", tmp_path / "words")
    paths = [
        f"model.path=[{', '.join(str(file) for file in sorted(files.iterdir()))}]",
        "model.variant=wan2.1-t2v-1.3b",
    ]
    with pytest.raises(UserError, match="lacks the tokenizer"):
        check_encoding(runs.config(model, clips, tmp_path / "run", *paths))
    given = f"model.parts={{tokenizer: {tmp_path / 'words'}}}"
    assert (
        check_encoding(runs.config(model, clips, tmp_path / "run", *paths, given)).source.parts["tokenizer"]
        == tmp_path / "words"
    )
    for wrong, message in (
        ("{tokeniser: here}", "model.parts: wan has no part 'tokeniser'; it has text_encoder, vae, tokenizer"),
        ("{tokenizer: nowhere}", "model.parts.tokenizer: nowhere does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            check_inputs(runs.config(model, clips, tmp_path / "run", *paths, f"model.parts={wrong}"))


def test_parts_of_a_pipeline_stay_its_own(tiny: Path, clips: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.parts: .* is a pipeline in the diffusers layout"):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", "model.parts={tokenizer: here}"))


def test_weights_take_the_place_of_those_of_the_model(
    tiny: Path, originals: TinyModels, clips: Path, tmp_path: Path
) -> None:
    """Some of them, in the publisher's names; the rest stays."""
    published = load_file(originals("wan2.1-t2v-1.3b") / "diffusion_pytorch_model.safetensors")
    own = {"blocks.0.self_attn.q.weight": torch.full_like(published["blocks.0.self_attn.q.weight"], 0.5)}
    file = tmp_path / "own.safetensors"
    save_file(own, file)

    def config(name: str, *options: str) -> runs.Config:
        return runs.config(tiny, clips, tmp_path / name, *options)

    plain = dict(runs.fill_model(check_inputs(config("plain"))).model.named_parameters())
    filled = dict(runs.fill_model(check_inputs(config("own", f"model.weights={file}"))).model.named_parameters())
    changed = [name for name, value in plain.items() if not filled[name].equal(value)]
    assert changed == ["blocks.0.attn1.to_q.base_layer.weight"]
    assert filled[changed[0]].equal(own["blocks.0.self_attn.q.weight"])

    for name, tensors, message in (
        ("lora", {"blocks.0.self_attn.q.lora_A.weight": torch.zeros(4, 4)}, "is a LoRA, not weights"),
        ("other", {"blocks.0.nothing": torch.zeros(4)}, "has blocks.0.nothing, which the model does not have"),
        ("shape", {"blocks.0.self_attn.q.weight": torch.zeros(4, 4)}, r"of shape \(4, 4\), and the model"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=f"model.weights: .*{message}"):
            check_inputs(config(name, f"model.weights={file}"))


def test_a_checkpoint_is_no_other_run_for_these_options(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """They decide what is trained on what: going on without them is refused."""
    file = tmp_path / "own.safetensors"
    save_file(
        {
            "proj_out.bias": torch.zeros(
                load_file(next((tiny / "transformer").glob("*.safetensors")))["proj_out.bias"].shape
            )
        },
        file,
    )
    one = runs.config(tiny, clips, tmp_path / "run", "train.steps=1", f"model.weights={file}", "save.every_epochs=1")
    saved = runs.run(one)
    assert json.loads((saved / "state.json").read_text(encoding="utf-8"))["config"]["model"]["weights"] == str(file)
    with pytest.raises(UserError, match=r"model.weights was .* and is None"):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", "train.steps=2", "resume=auto"))
