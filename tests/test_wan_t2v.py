"""DiffSynth-Studio's earlier script for Wan: its tasks, options and files."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from flowshard.compat.arguments import parse
from flowshard.compat.migrate import migrate
from flowshard.compat.wan_t2v import CACHE, main, translate
from flowshard.compat.wan_t2v_options import EARLIER, EARLIER_OPTIONS
from flowshard.config_file import load_config
from flowshard.families.wan_files import CLIP, TEXT_ENCODER, VAE
from tests import runs
from tests.launch import python

TEXT, IMAGE = "wan2.1-t2v-1.3b", "wan2.1-i2v-14b-480p"
FILE = "diffusion_pytorch_model.safetensors"
SMALL = ["--num_frames", "5", "--height", "48", "--width", "32"]
ALONE = ["--processes", "1", "--set", "model.dtype=float32"]
Originals = Callable[[str], Path]


@pytest.fixture
def data(tmp_path: Path, clips: Path) -> Path:
    """A data set as the script wants it."""
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    lines = ["file_name,text"]
    for number in range(3):
        shutil.copy(clips / f"clip_{number}.mp4", folder / "train")
        lines.append(f'clip_{number}.mp4,"a rabbit, number {number}"')
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _encoders(model: Path, *, image: bool = False) -> list[str]:
    files = ["--text_encoder_path", str(model / TEXT_ENCODER), "--vae_path", str(model / VAE)]
    return [*files, *(["--image_encoder_path", str(model / CLIP)] if image else [])]


def _transformer(model: Path, folder: Path) -> str:
    """The model's transformer alone, in two files, as `--dit_path` takes it."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    tensors = load_file(model / FILE)
    names = sorted(tensors)
    files = []
    for name, part in (("a", names[::2]), ("b", names[1::2])):
        save_file({one: tensors[one] for one in part}, folder / f"{name}.safetensors")
        files.append(str(folder / f"{name}.safetensors"))
    return ",".join(files)


def _process(data: Path, *options: str) -> int:
    return main(["--task", "data_process", "--dataset_path", str(data), *SMALL, *ALONE, *options])


def _losses(output: Path) -> list[float]:
    lines = (output / "flowshard" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _shapes(file: Path) -> dict[str, list[int]]:
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118


def test_samples_are_encoded_and_then_trained_from_with_the_transformer_alone(
    originals: Originals, data: Path, tmp_path: Path
) -> None:
    model, output = originals(TEXT), tmp_path / "output"
    assert _process(data, *_encoders(model)) == 0
    transformer = _transformer(model, tmp_path / "dit")
    train = ["--task", "train", "--dataset_path", str(data), "--output_path", str(output), "--dit_path", transformer]
    lora = ["--lora_rank", "3", "--lora_alpha", "6", "--lora_target_modules", "q,ffn.0", "--learning_rate", "1e-3"]
    # The size comes from the encoded samples. Five samples in updates of two are three updates, twice.
    steps = ["--steps_per_epoch", "5", "--max_epochs", "2", "--accumulate_grad_batches", "2"]
    assert main([*train, *lora, *steps, *ALONE]) == 0

    losses = _losses(output)
    migrated = tmp_path / "migrated.yaml"
    words = ["python", "examples/wanvideo/train_wan_t2v.py", *train, *lora, *steps, *ALONE]
    migrated.write_text(migrate(words), encoding="utf-8")
    again = load_config(migrated, [f"output={tmp_path / 'again'}"])
    runs.run(again)
    assert [line["loss"] for line in runs.metrics(again)] == pytest.approx(losses, rel=1e-6)
    assert len(losses) == 6
    assert sorted(file.name for file in output.iterdir()) == [
        "epoch-0.safetensors",
        "epoch-1.safetensors",
        "flowshard",
        "training_args.json",
    ]
    for epoch in range(2):
        shapes = _shapes(output / f"epoch-{epoch}.safetensors")
        layers = {f"blocks.{i}.{a}.q": (192, 192) for i in range(3) for a in ("self_attn", "cross_attn")}
        layers |= {f"blocks.{i}.ffn.0": (192, 256) for i in range(3)}
        assert shapes.keys() == {f"{name}.lora_{factor}.default.weight" for name in layers for factor in "AB"}
        assert {name.split(".")[1] for name in shapes} == {"0", "1", "2"}
        assert all(shape[0 if "lora_A" in name else 1] == 3 for name, shape in shapes.items())

    # The same run as a config of ours that encodes by itself.
    config = tmp_path / "own.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "output": str(tmp_path / "own"),
                "model": {"variant": TEXT, "path": str(model), "dtype": "float32"},
                "data": {
                    "metadata": str(data / "metadata.csv"),
                    "root": str(data / "train"),
                    "height": 48,
                    "width": 32,
                    "frames": 5,
                },
                "train": {"steps": 6, "global_batch": 2, "learning_rate": 1e-3, "clip_norm": None},
                "lora": {"rank": 3, "alpha": 6, "targets": ["q", "ffn.0"]},
                "objective": {"preset": "diffsynth", "stratified": False},
            }
        ),
        encoding="utf-8",
    )
    read = load_config(config)
    runs.run(read)
    assert [line["loss"] for line in runs.metrics(read)] == pytest.approx(losses, rel=1e-6)


def test_image_to_video_needs_samples_with_pictures(
    originals: Originals, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = originals(IMAGE)
    assert _process(data, *_encoders(originals(TEXT))) == 0
    transformer = _transformer(model, tmp_path / "dit")
    train = ["--task", "train", "--dataset_path", str(data), "--output_path", str(tmp_path / "o"), *ALONE]
    train += ["--dit_path", transformer, "--steps_per_epoch", "1"]
    assert main(train) == 2
    message = capsys.readouterr().err
    assert "--dit_path: the files are of wan2.1-i2v-14b-480p, which needs input_image, and" in message
    assert "run --task data_process again with --image_encoder_path" in message
    assert _process(data, *_encoders(model, image=True)) == 0
    assert main([*train, "--num_frames", "21"]) == 0
    assert "note: --num_frames 21: the samples were encoded with 5, which counts" in capsys.readouterr().out
    assert len(_losses(tmp_path / "o")) == 1


def test_tiles_of_the_options_are_those_of_the_samples(
    originals: Originals, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiles = ["--tiled", "--tile_size_height", "4", "--tile_size_width", "4"]
    strides = ["--tile_stride_height", "2", "--tile_stride_width", "4"]
    assert _process(data, *_encoders(originals(TEXT)), *tiles, *strides) == 0
    record = json.loads((data / CACHE / "data_process.json").read_text())
    assert record == {
        "kind": "wan",
        "size": {"frames": 5, "height": 48, "width": 32, "tiles": [32, 32, 16, 32]},
    }
    assert _process(data, *_encoders(originals(TEXT)), *tiles) == 2
    assert "--tiled (data.tiles): tiles of 32 pixels at steps of 144" in capsys.readouterr().err.replace(
        " / --tile_size_height / --tile_size_width", ""
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--task, --dataset_path must be given"),
        (["--task", "test", "--dataset_path", "d"], "--task: 'test' is none of data_process, train"),
        (["--task", "train", "--dataset_path", "d"], "--dit_path: must be given with --task train"),
        (["--task", "data_process", "--dataset_path", "d"], "--text_encoder_path: must be given with --task data_proc"),
        (["--task", "train", "--dataset_path", "d", "--training_strategy", "ddp"], "'ddp' is none of auto, deepspeed_"),
        (["--task", "train", "--dataset_path", "d", "--lora_ranks", "4"], "--lora_ranks: unknown option; did you mean"),
        (["--task", "train", "--dataset_path", "d", "--max_epochs", "0"], "--max_epochs: 0 is not a number from 1"),
        (["--task", "train", "--dataset_path", "d", "--max_epochs", "x"], "argument --max_epochs: invalid int value"),
        (
            ["--task", "train", "--dataset_path", "d", "--dit_path", "none.safetensors"],
            "none.safetensors matches no file",
        ),
    ],
)
def test_what_is_wrong_is_said_in_the_scripts_words(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--processes", "1"]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_not_there_yet_are_named(
    originals: Originals, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["--task", "train", "--dataset_path", str(data), "--dit_path", str(originals(TEXT) / FILE), *ALONE]
    assert main([*train]) == 2
    assert "holds no encoded samples; run --task data_process first" in capsys.readouterr().err
    given = [*train, *_encoders(originals(TEXT)), *SMALL, "--output_path", str(tmp_path)]
    assert main([*given, "--pretrained_lora_path", "epoch=0-step=500.ckpt"]) == 2
    assert "--pretrained_lora_path: epoch=0-step=500.ckpt is no .safetensors file" in capsys.readouterr().err
    assert main([*given, "--train_architecture", "full", "--pretrained_lora_path", "a.safetensors"]) == 2
    assert "belongs to --train_architecture lora" in capsys.readouterr().err
    assert main([*given, "--num_frames", "6"]) == 2
    assert "--num_frames (data.frames): 6 is not 4k+1" in capsys.readouterr().err


def test_every_option_decides_what_it_says(originals: Originals, data: Path, tmp_path: Path) -> None:
    """What each option says that it becomes is what changes in the config when it is given another value."""
    model = originals(IMAGE)
    lora = tmp_path / "lora.safetensors"
    base = {
        "task": "train",
        "dataset_path": str(data),
        "dit_path": str(model / FILE),
        "text_encoder_path": str(model / TEXT_ENCODER),
        "vae_path": str(model / VAE),
    }
    others = {
        "dataset_path": str(tmp_path / "other"),
        "dit_path": str(originals(TEXT) / FILE),
        "text_encoder_path": str(originals(TEXT) / TEXT_ENCODER),
        "vae_path": str(originals(TEXT) / VAE),
        "image_encoder_path": str(model / CLIP),
        "train_architecture": "full",
        "training_strategy": "deepspeed_stage_2",
        "lora_target_modules": "k",
        "init_lora_weights": "gaussian",
        "pretrained_lora_path": str(lora),
        "output_path": str(tmp_path),
    }

    def config(given: Mapping[str, str | None]) -> dict[str, object]:
        words = [word for name, value in given.items() for word in (f"--{name}", *([] if value is None else [value]))]
        tree = translate(parse(EARLIER, words), {"WORLD_SIZE": "2"}).tree
        return {
            f"{section}.{key}": one
            for section, its in tree.items()
            if isinstance(its, dict)
            for key, one in its.items()
        } | {name: one for name, one in tree.items() if not isinstance(one, dict)}

    assert config(base)["train.global_batch"] == 2
    for option in EARLIER_OPTIONS:
        if not option.fields or option.name.startswith("tile_"):
            continue
        value = None if option.kind is bool else others.get(option.name, "9")
        before, after = config(base), config({**base, option.name: value})
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        if option.name == "accumulate_grad_batches":  # samples of an epoch stay as many
            changed -= {"train.steps"}
        if option.name == "train_architecture":
            changed = {name for name in changed if not name.startswith("lora.")} - {"train.groups"}
        assert changed, option.name
        assert changed <= {*option.fields, "save.every"}, option.name


def test_migrate_knows_how_many_processes_the_script_starts(originals: Originals, data: Path) -> None:
    files = ["--dit_path", str(originals(TEXT) / FILE), *_encoders(originals(TEXT))]
    line = ["python", "examples/wanvideo/train_wan_t2v.py", "--task", "train", "--dataset_path", str(data), *files]
    line += ["--steps_per_epoch", "10", "--training_strategy", "deepspeed_stage_3"]
    for words, count, steps in (
        (["CUDA_VISIBLE_DEVICES=0,1,2", *line], 3, 4),
        ([*line, "--processes", "2"], 2, 5),
        (["torchrun", "--nproc-per-node", "4", *line[1:]], 4, 3),
        (line, 1, 10),
    ):
        text = migrate(words)
        tree = yaml.safe_load(text)
        assert (tree["train"]["global_batch"], tree["train"]["steps"], tree["save"]["every"]) == (count, steps, steps)
        assert tree["layout"]["strategy"] == "zero3"
        started = "flowshard" if count == 1 else f"torchrun --nproc-per-node {count} -m flowshard"
        assert f"# {started} train THIS_FILE" in text


@pytest.mark.slow
@pytest.mark.parametrize("variant", [IMAGE, TEXT])
def test_two_processes_of_deepspeed_log_what_one_process_logs(
    originals: Originals, data: Path, tmp_path: Path, variant: str
) -> None:
    """The script starts them itself, with ZeRO-3, recomputed and offloaded activations."""
    model = originals(variant)
    assert _process(data, *_encoders(model, image=variant == IMAGE)) == 0
    common = ["--task", "train", "--train_architecture", "lora", "--dataset_path", str(data), "--num_frames", "21"]
    common += ["--dit_path", _transformer(model, tmp_path / "dit"), "--steps_per_epoch", "4", "--max_epochs", "2"]
    common += ["--learning_rate", "1e-4", "--lora_rank", "8", "--lora_alpha", "8", "--lora_target_modules", "q"]
    common += ["--set", "model.dtype=float32"]
    memory = ["--use_gradient_checkpointing", "--use_gradient_checkpointing_offload"]
    two = ["--accumulate_grad_batches", "1", "--training_strategy", "deepspeed_stage_3", *memory, "--processes", "2"]
    done = python(["examples/wanvideo/train_wan_t2v.py", *common, *two, "--output_path", str(tmp_path / "two")])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "layout      zero3, 2 processes" in done.stdout
    assert "activations 3 x offload" in done.stdout
    one = ["--accumulate_grad_batches", "2", "--processes", "1", "--output_path", str(tmp_path / "one")]
    assert main([*common, *one]) == 0
    losses = _losses(tmp_path / "one")
    assert len(losses) == 4
    assert _losses(tmp_path / "two") == pytest.approx(losses, rel=1e-6)
    for epoch in range(2):
        name = f"epoch-{epoch}.safetensors"
        shapes = _shapes(tmp_path / "two" / name)
        assert shapes == _shapes(tmp_path / "one" / name)
        assert "blocks.0.self_attn.q.lora_A.default.weight" in shapes


@pytest.mark.slow
def test_full_training_writes_every_tensor_in_the_publishers_names(
    originals: Originals, data: Path, tmp_path: Path
) -> None:
    model = originals(TEXT)
    full = ["--task", "train", "--train_architecture", "full", "--dataset_path", str(data), *_encoders(model), *SMALL]
    full += ["--dit_path", str(model / FILE), "--steps_per_epoch", "2", *ALONE, "--output_path", str(tmp_path / "o")]
    assert main(full) == 0
    assert _shapes(tmp_path / "o" / "epoch-0.safetensors") == _shapes(model / FILE)
