"""Wrong input on the command line: status 2 and one clear message, found before torch is imported."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from flowshard.cli import main
from flowshard.errors import UserError
from flowshard.families import get_family

CONFIG = """
output: {workspace}/run
model: {{variant: wan2.1-t2v-1.3b, path: {workspace}/model, dtype: float32}}
data: {{metadata: {workspace}/data/metadata.csv, height: 32, width: 32, frames: 5, cache: {workspace}/cache}}
train: {{steps: 1}}
lora: {{rank: 4, alpha: 4}}
"""


@pytest.fixture(scope="module")
def workspace(tiny: Path, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that would train, and everything that goes wrong below."""
    folder = tmp_path_factory.mktemp("bad-input")
    data = folder / "data"
    data.mkdir()
    shutil.copy(clips / "clip_0.mp4", data / "clip.mp4")
    Image.new("RGB", (32, 32)).save(data / "picture.png")
    for name in ("broken.mp4", "unknown.safetensors"):
        (data / name).write_bytes(b"neither a clip nor weights " * 10)
    for name, text in {
        "metadata": "video,prompt\nclip.mp4,x\n",
        "missing-medium": "video,prompt\nclip.mp4,x\nno.mp4,y\n",
        "missing-column": "video,words\nclip.mp4,x\n",
        "no-samples": "video,prompt\n",
        "unbalanced": 'video,prompt\nclip.mp4,"x\n',
        "outside": "video,prompt\n../model/model_index.json,x\n",
        "mixed": "video,image,prompt\nclip.mp4,,x\n,picture.png,y\n",
        "unreadable": "video,prompt\nclip.mp4,x\nbroken.mp4,y\n",
    }.items():
        (data / f"{name}.csv").write_text(text, encoding="utf-8")
    (data / "windows.csv").write_bytes(b"video,prompt\nclip.mp4,a rabbit\x92s ear\n")
    (folder / "model").symlink_to(tiny)
    shutil.copytree(tiny, folder / "cogvideox")
    (folder / "cogvideox" / "model_index.json").write_text(json.dumps({"_class_name": "CogVideoXPipeline"}))
    shutil.copytree(tiny, folder / "truncated")
    weights = folder / "truncated" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "file").write_text("x")
    (folder / "broken.yaml").write_text("train: {steps: [}", encoding="utf-8")
    (folder / "config.yaml").write_text(CONFIG.format(workspace=folder), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Case:
    """A command line, in which `{}` is the workspace, and what its message has to hold."""

    name: str
    arguments: tuple[str, ...]
    parts: tuple[str, ...]


def _train(name: str, *overrides: str, parts: tuple[str, ...]) -> Case:
    return Case(name, ("train", "{}/config.yaml", *overrides), parts)


def _generate(name: str, *options: str, parts: tuple[str, ...], model: str = "{}/model") -> Case:
    sizes = ("--height", "32", "--width", "32", "--frames", "5", "--steps", "1", "--output", "{}/x.mp4")
    return Case(name, ("generate", "--model", model, "--prompt", "x", *sizes, *options), parts)


CASES = [
    Case("missing-config", ("train", "{}/no.yaml"), ("config file {}/no.yaml does not exist",)),
    Case("folder-as-config", ("train", "{}"), ("config file {} cannot be read",)),
    Case("broken-config", ("train", "{}/broken.yaml"), ("{}/broken.yaml: not valid YAML", "line 1")),
    _train("unknown-key", "train.stepz=3", parts=("train.stepz: unknown option", "did you mean train.steps?")),
    _train("wrong-type", "train.steps=many", parts=("train.steps: 'many' is not a valid integer",)),
    _train("no-override", "train.steps", parts=("'train.steps'", "option=value")),
    _train(
        "unknown-variant", "model.variant=wan2.1-t2v-1.33b", parts=("model.variant", "did you mean wan2.1-t2v-1.3b")
    ),
    _train("height-between", "data.height=40", parts=("data.height: 40 is not a multiple of 16", "use 32 or 48")),
    _train("height-too-small", "data.height=8", parts=("data.height: 8 is not a multiple of 16", "use 16")),
    _train("width", "data.width=1080", parts=("data.width: 1080 is not a multiple of 16", "use 1072 or 1088")),
    _train("frames", "data.frames=144", parts=("data.frames: 144 is not 4k+1", "use 141 or 145")),
    _train("two-frames", "data.frames=2", parts=("data.frames: 2 is not 4k+1", "use 1 or 5")),
    _train("no-metadata", "data.metadata={}/no.csv", parts=("data.metadata: the file {}/no.csv does not exist",)),
    _train("no-root", "data.root={}/no", parts=("data.root: the folder {}/no does not exist",)),
    _train(
        "no-medium",
        "data.metadata={}/data/missing-medium.csv",
        parts=("media of 1 of 2 rows do not exist", "row 2: {}/data/no.mp4"),
    ),
    _train(
        "no-column",
        "data.metadata={}/data/missing-column.csv",
        parts=("{}/data/missing-column.csv: the column 'prompt' is missing; found 'video', 'words'",),
    ),
    _train("no-samples", "data.metadata={}/data/no-samples.csv", parts=("no-samples.csv: holds no samples",)),
    _train("quotes", "data.metadata={}/data/unbalanced.csv", parts=("unbalanced.csv: ", "line 2", "quotes")),
    _train("outside", "data.metadata={}/data/outside.csv", parts=("row 1", "lies outside the data folder {}/data")),
    _train("not-utf8", "data.metadata={}/data/windows.csv", parts=("line 2, byte 18 (0x92) is not UTF-8",)),
    _train("no-model", "model.path={}/no", parts=("model.path: the folder {}/no does not exist",)),
    _train("no-pipeline", "model.path={}/data", parts=("model.path: {}/data is neither a diffusers pipeline",)),
    _train("other-pipeline", "model.path={}/cogvideox", parts=("model.path: ", "CogVideoXPipeline", "WanPipeline")),
    _train(
        "truncated-weights",
        "model.path={}/truncated",
        parts=("{}/truncated/transformer/diffusion_pytorch_model.safetensors: has ", "copy or download it again"),
    ),
    _train(
        "no-target", "lora.targets=[to_w]", parts=("lora.targets: the pattern 'to_w' matches nothing", "to_q", "to_k")
    ),
    _train("no-module", "train.modules=[atn1]", parts=("train.modules: the pattern 'atn1' matches nothing", "attn1")),
    _train(
        "no-group",
        "train.groups=[{pattern: lora_C}]",
        parts=("train.groups.0.pattern: the pattern 'lora_C' matches nothing", "lora_A", "lora_B"),
    ),
    _train("both", "train.modules=[attn1.to_q]", parts=("train.modules: blocks.0.attn1.to_q", "lora.targets")),
    _train("output-is-a-file", "output={}/file", parts=("output: {}/file is a file",)),
    _train("output-below-a-file", "output={}/file/run/x", parts=("output: {}/file is a file", "{}/file/run/x")),
    _train("cache-below-a-file", "data.cache={}/file/x", parts=("data.cache: {}/file is a file",)),
    _train(
        "mixed-micro-batch",
        "data.metadata={}/data/mixed.csv",
        "train.micro_batch=2",
        "train.global_batch=2",
        parts=("train.micro_batch: 2", "row 2: {}/data/picture.png", "train.micro_batch=1"),
    ),
    _generate("generate-no-model", parts=("--model: the folder {}/no does not exist",), model="{}/no"),
    _generate("generate-other-model", parts=("--model: ", "CogVideoXPipeline"), model="{}/cogvideox"),
    _generate("generate-height", "--height", "40", parts=("--height: 40 is not a multiple of 16", "use 32 or 48")),
    _generate("generate-no-height", "--height", "0", parts=("--height", "0")),
    _generate("generate-negative-width", "--width", "-32", parts=("--width", "-32")),
    _generate("generate-frames", "--frames", "6", parts=("--frames: 6 is not 4k+1", "use 5 or 9")),
    _generate("generate-no-frames", "--frames", "0", parts=("--frames", "0")),
    _generate("generate-negative-frames", "--frames", "-3", parts=("--frames", "-3")),
    _generate("generate-suffix", "--output", "{}/x.gif", parts=("--output: 5 frames are written as a .mp4 file",)),
    _generate("generate-picture", "--frames", "1", parts=("--output: one frame is written as a .png file",)),
    _generate("generate-folder", "--output", "{}/no/x.mp4", parts=("--output: the folder {}/no does not exist",)),
    _generate("generate-below-file", "--output", "{}/file/x.mp4", parts=("--output: ", "{}/file")),
    _generate("generate-steps", "--steps", "0", parts=("--steps and --fps are at least 1, not 0 and 16",)),
    _generate("generate-no-lora", "--lora", "{}/no", parts=("--lora: {}/no does not exist",)),
    _generate("generate-empty-lora", "--lora", "{}/data", parts=("--lora: {}/data", "holds no lora.safetensors")),
    _generate("generate-bad-lora", "--lora", "{}/data/unknown.safetensors", parts=("{}/data/unknown.safetensors: ",)),
    _generate("generate-no-weights", "--weights", "{}/data", parts=("--weights: {}/data", "holds no config.json")),
    _generate(
        "generate-both", "--lora", "{}/a", "--weights", "{}/b", parts=("--lora and --weights exclude each other",)
    ),
    Case("tiny-nothing", ("tiny",), ("give VARIANT and DIR",)),
    Case("tiny-variant", ("tiny", "wan2.1-t2v-1.33b", "{}/new"), ("VARIANT", "did you mean wan2.1-t2v-1.3b")),
]


def _fill(texts: tuple[str, ...], workspace: Path) -> list[str]:
    return [text.replace("{}", str(workspace)) for text in texts]


def _check_message(message: str) -> None:
    first, *others = message.splitlines()
    assert first.startswith("flowshard: error: ")
    # Further lines only go on with the same message.
    assert all(line.startswith(("  ", "train.", "data.")) for line in others)
    assert "Traceback" not in message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mistake_ends_with_status_2_and_one_message(
    workspace: Path, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_fill(case.arguments, workspace)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    _check_message(captured.err)
    for part in _fill(case.parts, workspace):
        assert part in captured.err


def test_nothing_is_written_when_the_input_is_wrong(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert main(_fill(("train", "{}/config.yaml", f"output={output}", "lora.targets=[to_w]"), workspace)) == 2
    assert not output.exists()


# Each command runs in a fork of one interpreter that has read our modules, so that none sees what another imported.
_PROBE = """
import contextlib, io, json, os, sys
import flowshard.cli, flowshard.config_file, flowshard.train.inputs, flowshard.generate
for name, arguments in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                status = flowshard.cli.main(arguments)
        except BaseException as error:
            status = type(error).__name__
        print(json.dumps([name, status, "torch" in sys.modules]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_mistake_is_found_before_torch_is_imported(workspace: Path) -> None:
    cases = [(case.name, _fill(case.arguments, workspace)) for case in CASES]
    done = subprocess.run([sys.executable, "-c", _PROBE], input=json.dumps(cases), capture_output=True, text=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[case.name, 2, False] for case in CASES]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("height", value) for value in (1, 8, 17, 40, 1080, 0, -16, -5)),
        *(("width", value) for value in (15, 33, 0)),
        *(("frames", value) for value in (2, 4, 6, 144, 0, -3, -4)),
    ],
)
def test_every_size_that_a_message_advises_is_legal(option: str, value: int) -> None:
    family = get_family("wan")
    sizes = {"height": 32, "width": 32, "frames": 5}
    with pytest.raises(UserError) as raised:
        family.check_size(**{**sizes, option: value}, where="data.")
    fact, _, advice = str(raised.value).rpartition("use ")
    assert fact.startswith(f"data.{option}: ")
    advised = [int(number) for number in re.findall(r"-?\d+", advice)]
    assert advised
    for number in advised:
        assert number > 0
        family.check_size(**{**sizes, option: number}, where="data.")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("data.metadata={}/data/unreadable.csv",), ("row 2", "broken.mp4", "cannot be decoded")),
        (("data.frames=37",), ("row 1", "clip.mp4", "has 33 frames, data.frames asks for 37")),
        (
            ("data.frames=37", "data.cache=off"),
            ("row 1", "clip.mp4", "has 33 frames, data.frames asks for 37"),
        ),
    ],
    ids=["unreadable", "too-short", "too-short-without-cache"],
)
def test_medium_that_only_decoding_can_judge_ends_with_status_2(
    workspace: Path,
    tmp_path: Path,
    overrides: tuple[str, ...],
    parts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = (f"output={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}")
    assert main(_fill(("train", "{}/config.yaml", *place, *overrides), workspace)) == 2
    message = capsys.readouterr().err
    errors = [line for line in message.splitlines() if line.startswith("flowshard: error: ")]
    assert len(errors) == 1
    assert "Traceback" not in message
    for part in parts:
        assert part in errors[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_permission_is_refused(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o555)
    assert main(_fill(("train", "{}/config.yaml", f"output={tmp_path}/run"), workspace)) == 2
    assert f"output: {tmp_path}/run is not writable" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train"],
        ["generate"],
        ["generate", "--frames", "many"],
        ["train", "a.yaml", "--steps=3"],
        ["plan", "a.yaml", "--devices", "8", "--steps=3", "data.frames=5"],
        ["tiny", "wan2.1-t2v-1.3b", "models/tiny", "data.frames=5"],
    ],
    ids=["nothing", "command", "train", "generate", "number", "flag", "flag between", "no override"],
)
def test_unknown_command_line_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert "error: " in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("import flowshard; print(flowshard.__version__)", "."),
        ("from flowshard.cli import main; main(['--help'])", "train a LoRA"),
        ("from flowshard.cli import main; main(['--version'])", "flowshard"),
        ("from flowshard.cli import main; main(['train', '--help'])", "train.learning_rate"),
        ("from flowshard.cli import main; main(['generate', '--help'])", "--negative-prompt"),
        ("from flowshard.cli import main; main(['tiny', '--list'])", "wan2.1-t2v-1.3b"),
    ],
    ids=["import", "help", "version", "train-help", "generate-help", "tiny-list"],
)
def test_help_imports_no_heavy_library(code: str, word: str) -> None:
    probe = (
        "import atexit, sys\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'peft', 'deepspeed', 'accelerate'}\n"
        "atexit.register(lambda: sys.stderr.write(f'heavy={sorted(heavy & set(sys.modules))}'))\n" + code
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == "heavy=[]"
    assert word in done.stdout
