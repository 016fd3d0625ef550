"""DiffSynth-Studio's command lines, run: what they write, and that layouts and the migrated config give the same losses."""

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from flowshard.cli import main as flowshard
from flowshard.compat.diffsynth import main
from tests import diffsynth_lines as lines
from tests.diffsynth_lines import BRANCH, EXACT, FLF2V, FLUX, QWEN, RANK, RECIPES, WAN, Recipe, TinyModels

Shapes = dict[str, tuple[int, ...]]
FLUX_RENAMED = {
    "time_in.in_layer": "time_embedder.timestep_embedder.0",
    "time_in.out_layer": "time_embedder.timestep_embedder.2",
    "guidance_in.in_layer": "guidance_embedder.timestep_embedder.0",
    "guidance_in.out_layer": "guidance_embedder.timestep_embedder.2",
    "vector_in.in_layer": "pooled_text_embedder.0",
    "vector_in.out_layer": "pooled_text_embedder.2",
    "txt_in": "context_embedder",
    "img_in": "x_embedder",
    "final_layer.linear": "final_proj_out",
    "final_layer.adaLN_modulation.1": "final_norm_out.linear",
    "img_attn.norm.key_norm.scale": "attn.norm_k_a.weight",
    "img_attn.norm.query_norm.scale": "attn.norm_q_a.weight",
    "txt_attn.norm.key_norm.scale": "attn.norm_k_b.weight",
    "txt_attn.norm.query_norm.scale": "attn.norm_q_b.weight",
    "img_attn.proj": "attn.a_to_out",
    "img_attn.qkv": "attn.a_to_qkv",
    "txt_attn.proj": "attn.b_to_out",
    "txt_attn.qkv": "attn.b_to_qkv",
    "img_mlp": "ff_a",
    "txt_mlp": "ff_b",
    "img_mod.lin": "norm1_a.linear",
    "txt_mod.lin": "norm1_b.linear",
    "modulation.lin": "norm.linear",
    "linear1": "to_qkv_mlp",
    "linear2": "proj_out",
    "norm.key_norm.scale": "norm_k_a.weight",
    "norm.query_norm.scale": "norm_q_a.weight",
}
"""The publisher's names of FLUX.1 in those of DiffSynth-Studio's model, as its converter has them."""
JOINED = {"a_to_qkv": 3, "b_to_qkv": 3, "to_qkv_mlp": 4}
"""Layers of FLUX.1 that are several of diffusers', each with adapters of its own: how many."""


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, clips: Path, tiny_models: TinyModels, originals: TinyModels
) -> Path:
    place = tmp_path_factory.mktemp("scripts")
    lines.prepare(place, clips, tiny_models, originals, WAN)
    return place


@pytest.fixture(scope="module")
def all_models(folder: Path, clips: Path, tiny_models: TinyModels, originals: TinyModels) -> Path:
    lines.prepare(folder, clips, tiny_models, originals, *RECIPES.values(), FLF2V)
    return folder


def _shapes(file: Path) -> Shapes:
    with safe_open(file, framework="pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def _model_file(folder: Path, recipe: Recipe) -> Path:
    """Of the tiny transformer."""
    return next(
        (folder / "models" / recipe.repository).glob(
            next(
                file
                for file in recipe.files
                if "t5" not in file and (file.startswith(("transformer", "diffusion", "flux1")))
            )
        )
    )


def _their_name(name: str, recipe: Recipe) -> str:
    """Of a tensor in DiffSynth-Studio's model, from that in the published file."""
    if recipe is not FLUX:
        return name
    name = name.replace("double_blocks.", "blocks.")
    head, rest = re.fullmatch(r"((?:single_)?blocks\.\d+\.)?(.+)", name).groups("")  # type: ignore[union-attr]
    for publishers, theirs in FLUX_RENAMED.items():
        if rest == publishers or rest.startswith(f"{publishers}."):
            return head + theirs + rest.removeprefix(publishers)
    return name


def _lora_shapes(whole: Shapes, recipe: Recipe) -> Shapes:
    """Of the file of a LoRA: peft's names on the layers whose name ends with a target."""
    expected: Shapes = {}
    for name, shape in whole.items():
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or not any(f".{layer}".endswith(f".{target}") for target in recipe.targets.split(",")):
            continue
        rank = RANK * JOINED.get(layer.rpartition(".")[2], 1) if recipe is FLUX else RANK
        expected[f"{layer}.lora_A.default.weight"] = (rank, shape[1])
        expected[f"{layer}.lora_B.default.weight"] = (shape[0], rank)
    return expected


def _losses(output: Path) -> list[float]:
    with (output / "loss.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["key"] for row in rows] == ["loss"] * len(rows)
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["value"]) for row in rows]


def _metrics(run: Path) -> list[float]:
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["loss"] for line in text.splitlines()]


def _migrated(words: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """The losses of the config that `flowshard migrate` prints, trained in this process."""
    capsys.readouterr()
    assert flowshard(["migrate", "--", *words]) == 0
    place.with_suffix(".yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert flowshard(["train", f"{place}.yaml", f"output={place}"]) == 0
    return _metrics(place)


def test_a_recipe_runs_and_its_migrated_config_as_well(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    output = tmp_path / "lora"
    cache = ("--set", f"data.cache={tmp_path / 'cache'}")
    line = WAN.line(output, *EXACT, *cache, "--enable_csv_log", "--num_epochs", "2", "--lora_rank", str(RANK))
    assert main("wan", line) == 0
    losses = _losses(output)
    assert len(losses) == 10
    assert losses == _metrics(output / "flowshard")
    expected = _lora_shapes(_shapes(_model_file(folder, WAN)), WAN)
    assert len(expected) == 60
    for epoch in range(2):
        assert _shapes(output / f"epoch-{epoch}.safetensors") == expected
    assert len(list(output.glob("*.safetensors"))) == 2
    first, last = (load_file(output / f"epoch-{epoch}.safetensors") for epoch in range(2))
    assert not any(first[name].equal(last[name]) for name in first)
    saved = load_file(output / "flowshard" / "checkpoints" / "step-00000010" / "lora.safetensors")
    ours = saved["transformer.blocks.0.attn1.to_q.lora_B.weight"]
    assert last["blocks.0.self_attn.q.lora_B.default.weight"].equal(ours)
    arguments = json.loads((output / "training_args.json").read_text(encoding="utf-8"))
    assert arguments["lora_rank"] == RANK
    assert arguments["max_pixels"] == 1024 * 1024  # a default

    words = ["accelerate", "launch", "--num_processes", "1", "examples/wanvideo/model_training/train.py", *line]
    assert _migrated(words, tmp_path / "migrated", capsys) == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_files_are_named_after_updates(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and LoRA files go on from where they were written, and a run from where it stopped."""
    monkeypatch.chdir(folder)
    cache = ("--set", f"data.cache={tmp_path / 'cache'}")
    full, lora = tmp_path / "full", tmp_path / "lora"
    same = (*EXACT, *cache, "--learning_rate", "0")
    assert main("wan", WAN.line(full, *same, "--save_steps", "3", "--remove_prefix_in_ckpt", "", full=True)) == 0
    assert {file.name for file in full.glob("*.safetensors")} == {"step-3.safetensors", "step-5.safetensors"}
    published = load_file(_model_file(folder, WAN))
    found = load_file(full / "step-3.safetensors")
    assert found.keys() == {f"pipe.dit.{name}" for name in published}
    assert all(found[f"pipe.dit.{name}"].equal(value) for name, value in published.items())

    line = WAN.line(
        lora, *EXACT, *cache, "--enable_csv_log", "--resume_from_checkpoint", str(full / "step-5.safetensors")
    )
    assert main("wan", [*line, "--set", "train.steps=3", "--set", "train.epochs=null"]) == 0
    part = _losses(lora)
    assert len(part) == 3
    again = ("--set", f"resume={lora / 'flowshard' / 'checkpoints' / 'step-00000003'}")
    assert main("wan", [*line, "--set", "train.steps=5", "--set", "train.epochs=null", *again]) == 0
    assert _losses(lora)[:3] == part
    assert _losses(lora) == _metrics(lora / "flowshard")
    started = tmp_path / "started"
    from_file = ("--lora_checkpoint", str(lora / "epoch-0.safetensors"), "--learning_rate", "0")
    assert main("wan", WAN.line(started, *EXACT, *cache, *from_file)) == 0
    before, after = load_file(lora / "epoch-0.safetensors"), load_file(started / "epoch-0.safetensors")
    assert before.keys() == after.keys()
    assert all(after[name].equal(value) for name, value in before.items())


@pytest.mark.slow
def test_samples_are_encoded_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--task sft:data_process`, and training with what it wrote alone: as in one go, and nothing is encoded again."""
    monkeypatch.chdir(folder)
    encoded = tmp_path / "encoded"
    assert main("wan", WAN.line(encoded, *EXACT, "--task", "sft:data_process")) == 0
    files = sorted(encoded.rglob("*.safetensors"))
    assert len(files) == 10
    assert not (encoded / "training_args.json").exists()
    line = WAN.line(tmp_path / "two", *EXACT, "--enable_csv_log", "--task", "sft:train")
    for option, value in (("--dataset_base_path", [str(encoded)]), ("--dataset_metadata_path", None)):
        place = line.index(option)
        line[place : place + 2] = [] if value is None else [option, *value]
    place = line.index("--model_id_with_origin_paths")
    line[place + 1] = f"{WAN.repository}:{WAN.files[0]}"  # the transformer alone
    assert main("wan", line) == 0
    assert sorted(encoded.rglob("*.safetensors")) == files
    assert main("wan", WAN.line(tmp_path / "one", *EXACT, "--enable_csv_log")) == 0
    assert _losses(tmp_path / "two") == pytest.approx(_losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.slow
def test_pictures_keep_their_own_size(all_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without height and width, as the recipes for pictures are: 64 x 48 pixels, and fewer with a smaller budget."""
    monkeypatch.chdir(all_models)
    for pixels, size in (("1048576", [48, 64]), ("2000", [32, 48])):
        line = QWEN.line(tmp_path / pixels, *EXACT, "--max_pixels", pixels)
        del line[line.index("--height") : line.index("--width") + 2]
        assert main("qwen-image", line) == 0
        sets = list((tmp_path / pixels / "flowshard" / "cache" / "sets").glob("*.json"))
        assert [row["size"] for row in json.loads(sets[0].read_text(encoding="utf-8"))["rows"]] == [size] * 3


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("series", RECIPES)
def test_a_line_of_every_series(
    series: str,
    full: bool,
    all_models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Started with plain python. Trained with a rate of 0, full weights are those of the published file."""
    recipe = RECIPES[series]
    still = ("--learning_rate", "0") if full else ()
    line = recipe.line(tmp_path / "out", *EXACT, "--enable_csv_log", *still, full=full)
    done = lines.run(all_models, recipe, line)
    assert done.returncode == 0, done.stderr
    published = {_their_name(name, recipe): shape for name, shape in _shapes(_model_file(all_models, recipe)).items()}
    expected = published if full else _lora_shapes(published, recipe)
    assert _shapes(tmp_path / "out" / "epoch-0.safetensors") == expected
    if full:
        values = {_their_name(name, recipe): one for name, one in load_file(_model_file(all_models, recipe)).items()}
        found = load_file(tmp_path / "out" / "epoch-0.safetensors")
        assert all(found[name].equal(value) for name, value in values.items())
    else:
        assert len(expected) >= 32

    monkeypatch.chdir(all_models)
    losses = _losses(tmp_path / "out")
    assert all(loss > 0 for loss in losses)
    words = [sys.executable, str(recipe.script), *line]
    assert _migrated(words, tmp_path / "migrated", capsys) == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_a_lora_of_flux_in_the_publishers_names(
    all_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--align_to_opensource_format`: the same change of every layer, with alpha equal to the rank."""
    monkeypatch.chdir(all_models)
    cache = ("--set", f"data.cache={tmp_path / 'cache'}")
    assert main("flux", FLUX.line(tmp_path / "plain", *EXACT, *cache)) == 0
    assert main("flux", FLUX.line(tmp_path / "aligned", *EXACT, *cache, "--align_to_opensource_format")) == 0
    plain = load_file(tmp_path / "plain" / "epoch-0.safetensors")
    aligned = load_file(tmp_path / "aligned" / "epoch-0.safetensors")
    theirs = {f"lora_unet_{name.rpartition('.')[0].replace('.', '_')}": _their_name(name, FLUX).rpartition(".")[0]
              for name in _shapes(_model_file(all_models, FLUX)) if name.endswith("weight")}  # fmt: skip
    layers = {name.partition(".lora_A")[0] for name in plain if ".lora_A." in name}
    assert {name.partition(".")[0] for name in aligned} == {name for name, layer in theirs.items() if layer in layers}
    assert {name.partition(".")[2] for name in aligned} == {"lora_up.weight", "lora_down.weight", "alpha"}
    for name in {key.partition(".")[0] for key in aligned}:
        up, down, alpha = (aligned[f"{name}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha"))
        assert alpha.shape == ()
        assert int(alpha) == up.shape[1] == down.shape[0]
        layer = theirs[name]
        assert (up @ down).equal(plain[f"{layer}.lora_B.default.weight"] @ plain[f"{layer}.lora_A.default.weight"])


@pytest.mark.slow
def test_the_branch_of_vace_is_trained_alone(
    folder: Path,
    clips: Path,
    tiny_models: TinyModels,
    originals: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the recipes name it, with the prefix of its model in the pipeline; and it goes on from such a file."""
    lines.prepare(folder, clips, tiny_models, originals, BRANCH)
    monkeypatch.chdir(folder)
    cache = ("--set", f"data.cache={tmp_path / 'cache'}")
    published = _shapes(_model_file(folder, BRANCH))
    branch = {name: shape for name, shape in published.items() if name.startswith("vace_")}
    full, lora, last = tmp_path / "full", tmp_path / "lora", tmp_path / "last"
    assert main("wan", BRANCH.line(full, *EXACT, *cache, "--trainable_models", "vace", full=True)) == 0
    found = load_file(full / "epoch-0.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        f"pipe.vace.{name}": shape for name, shape in branch.items()
    }
    plain = ("--remove_prefix_in_ckpt", "pipe.vace.")
    assert main("wan", BRANCH.line(lora, *EXACT, *cache, "--lora_base_model", "vace", *plain)) == 0
    assert _shapes(lora / "epoch-0.safetensors") == _lora_shapes(branch, BRANCH)

    still = ("--learning_rate", "0", "--trainable_models", "vace", "--enable_model_cpu_offload")
    resumed = ("--resume_from_checkpoint", str(full / "epoch-0.safetensors"))
    assert main("wan", BRANCH.line(last, *EXACT, *cache, *plain, *still, *resumed, full=True)) == 0
    after = load_file(last / "epoch-0.safetensors")
    assert after.keys() == branch.keys()
    assert all(value.equal(found[f"pipe.vace.{name}"]) for name, value in after.items())


ACCEPTANCE = (
    "--dataset_base_path data/clips --dataset_metadata_path data/metadata_s2v.csv --height 32 --width 32 --num_frames 5 "
    "--dataset_repeat 2 --learning_rate 1e-4 --num_epochs 1 --remove_prefix_in_ckpt pipe.dit. --lora_base_model dit "
    "--lora_target_modules q,k,v,o,ffn.0,ffn.2 --lora_rank 4 --extra_inputs input_image,end_image"
)


@pytest.mark.slow
def test_sequence_parallelism_logs_the_same_losses(
    all_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes alone, and eight of which four share a sample: two data-parallel groups each, so one global batch."""
    rows = list(csv.DictReader((all_models / "data" / "clips" / "metadata.csv").open(encoding="utf-8")))
    with (all_models / "data" / "metadata_s2v.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(("video", "prompt", "input_audio", "s2v_pose_video", "input_image"))
        table.writerows((row["video"], row["prompt"], "sound.wav", "pose.mp4", "nowhere.png") for row in rows[:4])
    losses = []
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", "--multi_gpu", "--num_machines", "1"]
    for processes, sequence in ((2, 1), (8, 4)):
        output = tmp_path / f"sp{sequence}"
        options = [
            *shlex.split(ACCEPTANCE),
            "--model_id_with_origin_paths",
            FLF2V.entries,
            "--output_path",
            str(output),
        ]
        options += [*EXACT, "--set", f"data.cache={tmp_path / 'cache'}", "--enable_csv_log", "--sp_size", str(sequence)]
        done = lines.launch(all_models, [*launch, "--num_processes", str(processes), str(FLF2V.script), *options])
        assert done.returncode == 0, done.stderr
        losses.append(_losses(output))
        assert _shapes(output / "epoch-0.safetensors") == _lora_shapes(_shapes(_model_file(all_models, FLF2V)), FLF2V)
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)

    # The same in one process: the config has the batch of all.
    monkeypatch.chdir(all_models)
    words = ["CUDA_VISIBLE_DEVICES=0,1", "accelerate", "launch", str(FLF2V.script), *options, "--sp_size", "1"]
    assert _migrated(words, tmp_path / "migrated", capsys) == pytest.approx(losses[0], rel=1e-6)
