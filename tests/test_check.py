"""`flowshard check`: planted faults are each found at their row, and what it says of good data is counted by hand."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageFont

from flowshard.cli import main
from flowshard.data.media import read_frames, write_video
from flowshard.data.sheet import wrapped

CONFIG = """
output: {folder}/run
model: {{variant: wan2.1-t2v-1.3b, path: {folder}/model}}
data: {{metadata: {folder}/data/metadata.jsonl, height: 32, width: 48, frames: 5}}
train: {{steps: 6, global_batch: 4}}
"""


def _grey(frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    return np.stack([np.full((height, width, 3), 20 * (number % 12) + 20, dtype=np.uint8) for number in range(frames)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config, whose data a test writes, and some media."""
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    write_video(data / "clip.mp4", _grey(9), fps=8)
    Image.fromarray(_grey(1)[0]).save(data / "picture.png")
    return tmp_path


def _write(folder: Path, rows: list[Any]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "data" / "metadata.jsonl").write_text("\n".join(lines))


def _check(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["check", str(folder / "config.yaml"), *arguments, "--json", "--workers", "2"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    return status, report


def _sound_alone(file: Path) -> None:
    with av.open(str(file), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _truncated(file: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:1500])


def _without_index(file: Path) -> None:
    write_video(file, _grey(5), fps=8)
    file.write_bytes(file.read_bytes().replace(b"moov", b"none"))


def _half(file: Path) -> None:
    write_video(file, _grey(60, 128, 128), fps=8)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def _outside(file: Path) -> None:
    (file.parents[1] / "clip.mp4").write_bytes(b"x")


MADE: dict[str, Callable[[Path], Any]] = {
    "empty.mp4": Path.touch,
    "text.png": lambda file: file.write_text("this is no picture"),
    "torn.jpg": _truncated,
    "no-index.mp4": _without_index,
    "half.mp4": _half,
    "sound.mp4": _sound_alone,
    "folder.mp4": Path.mkdir,
    "dangling.mp4": lambda file: file.symlink_to(file.parent / "nowhere.mp4"),
    "short.mp4": lambda file: write_video(file, _grey(4), fps=8),
    "still.gif": lambda file: Image.fromarray(_grey(1)[0]).save(file),
    "outside.mp4": _outside,
}
FAULTS: list[tuple[str, str, Any]] = [
    # What is found, what the message holds, and the row.
    ("missing file", "no.mp4 does not exist", {"video": "no.mp4", "prompt": "x"}),
    ("missing file", "dangling.mp4 does not exist", {"video": "dangling.mp4", "prompt": "x"}),
    ("missing file", "folder.mp4 does not exist", {"video": "folder.mp4", "prompt": "x"}),
    ("missing file", "frames_*.png does not exist", {"video": "frames_*.png", "prompt": "x"}),
    ("path", "lies outside the data folder", {"video": "../clip.mp4", "prompt": "x"}),
    ("not decodable", "empty.mp4): cannot be decoded", {"video": "empty.mp4", "prompt": "x"}),
    ("not decodable", "text.png): cannot be decoded", {"image": "text.png", "prompt": "x"}),
    ("not decodable", "torn.jpg): cannot be decoded", {"image": "torn.jpg", "prompt": "x"}),
    ("not decodable", "no-index.mp4): cannot be decoded", {"video": "no-index.mp4", "prompt": "x"}),
    ("not decodable", "half.mp4): cannot be decoded", {"video": "half.mp4", "prompt": "x"}),
    ("not decodable", "no video stream", {"video": "sound.mp4", "prompt": "x"}),
    ("too short", "has 4 frames, data.frames asks for 5", {"video": "short.mp4", "prompt": "x"}),
    ("too short", "has 1 frames, data.frames asks for 5", {"video": "still.gif", "prompt": "x"}),
    ("too short", "has 3 frames from start to end", {"video": "clip.mp4", "prompt": "x", "start": 0.75}),
    ("too short", "has 0 frames from start to end", {"video": "clip.mp4", "prompt": "x", "start": 7}),
    ("time", "'end' (1) must come after 'start' (2)", {"video": "clip.mp4", "prompt": "x", "start": 2, "end": 1}),
    ("time", "'start' must be seconds", {"video": "clip.mp4", "prompt": "x", "start": "soon"}),
    ("time", "are for clips", {"image": "picture.png", "prompt": "x", "start": 1}),
    ("row", "names both a video and an image", {"video": "clip.mp4", "image": "picture.png", "prompt": "x"}),
    ("row", "names no 'video' or 'image'", {"prompt": "x"}),
    ("row", "has no 'prompt'", {"video": "clip.mp4"}),
    ("row", "'prompt' must be text or a list of texts, not 3", {"video": "clip.mp4", "prompt": 3}),
    ("row", "'video' must be text, not 5", {"video": 5, "prompt": "x"}),
    ("row", "the key 'prompt' is there twice", '{"video": "clip.mp4", "prompt": "x", "prompt": "y"}'),
    ("row", "column", '{"video": "clip.mp4", "prompt": '),
    ("row", "is not an object", '"clip.mp4"'),
]


def test_every_planted_fault_is_found_at_its_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, make in MADE.items():
        make(folder / "data" / name)
    good = {"video": "clip.mp4", "prompt": "a good one"}
    _write(folder, [row for _, _, fault in FAULTS for row in (fault, good)])
    status, report = _check(folder, capsys)
    assert status == 2
    found = {problem["row"]: problem for problem in report["problems"]}
    assert len(found) == len(report["problems"]) == len(FAULTS)
    for number, (kind, text, _) in enumerate(FAULTS):
        problem = found[2 * number + 1]
        assert problem["kind"] == kind, problem
        assert text in problem["message"]
        assert problem["source"] == str(folder / "data" / "metadata.jsonl")
    # The same for people, which leaves out what is too much.
    assert main(["check", str(folder / "config.yaml")]) == 2
    printed = capsys.readouterr()
    assert "flowshard: error: 26 problems found" in printed.err
    assert f"  not decodable: 6\n    {folder}/data/metadata.jsonl, row 11 " in printed.out
    assert "    and 15 more\n" in printed.out


def test_good_data_is_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_video(folder / "data" / "long.mp4", _grey(12, 64, 96), fps=4)
    shutil.copy(folder / "data" / "clip.mp4", folder / "data" / "copy.mp4")
    rows: list[dict[str, Any]] = [
        {"video": "clip.mp4", "prompt": "one"},
        {"video": "long.mp4", "prompt": "two"},
        {"image": "picture.png", "prompt": ""},
        {"video": "copy.mp4", "prompt": "another"},
        {"video": "copy.mp4", "prompt": "one"},
        {"video": "long.mp4", "prompt": "two", "start": 1},
    ]
    _write(folder, rows)
    status, report = _check(folder, capsys, "data.repeat=2")
    assert status == 0
    assert report["problems"] == []
    facts = report["facts"]
    assert (facts["rows"], facts["clips"], facts["pictures"], facts["samples"]) == (6, 5, 1, 12)
    assert facts["sizes"] == {"48x32": 4, "96x64": 2}
    assert facts["frames"] == {"9 at 8 fps": 3, "12 at 4 fps": 2}
    assert facts["frames_used"] == {"5": 5, "1": 1}
    # 16 x 16 pixels are a token of each of (5 - 1) / 4 + 1 latent frames.
    assert facts["tokens"] == {"12": 5, "6": 1}
    assert facts["epoch"] == "3 steps of 4 samples"
    assert (facts["steps"], facts["epochs"]) == (6, 2.0)
    warned = {(warning["kind"], warning["row"]) for warning in report["warnings"]}
    assert warned == {("empty caption", 3), ("same medium", 4), ("same medium and caption", 5)}
    assert any("not on this machine" in line for line in report["not_checked"])


def test_media_that_are_skipped_are_no_problem_up_to_their_number(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data" / "bad.mp4").write_bytes(b"")
    bad, good = ({"video": name, "prompt": "x"} for name in ("bad.mp4", "clip.mp4"))
    _write(folder, [bad, good, bad])
    status, report = _check(folder, capsys, "data.on_error=skip")
    assert status == 0
    assert [(one["kind"], one["row"]) for one in report["warnings"]] == [("not decodable", 1), ("not decodable", 3)]
    assert "row 3 " in report["warnings"][1]["message"]
    assert _check(folder, capsys, "data.on_error=skip", "data.max_skipped=1")[0] == 2
    _write(folder, [bad])
    assert _check(folder, capsys, "data.on_error=skip")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("data.height=40",), "config", "data.height: 40 is not a multiple of 16"),
        (("data.frames=6",), "config", "data.frames: 6 is not 4k+1"),
        (("train.stepz=1",), "config", "train.stepz: unknown option"),
        (("data.metadata=no.csv",), "metadata", "the file no.csv does not exist"),
        (("model.variant=null",), "model", "set model.variant"),
        (("--processes", "3"), "layout", "cannot be divided among 3 processes"),
        (("data.sampling=middle",), "config", "data.sampling: 'middle' is not"),
        (("train.micro_batch=2",), "batch", "mixes clips of 5 frames with pictures (row 2:"),
    ],
)
def test_config_that_would_fail_is_a_problem(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], kind: str, text: str
) -> None:
    _write(folder, [{"video": "clip.mp4", "prompt": "x"}, {"image": "picture.png", "prompt": "y"}])
    status, report = _check(folder, capsys, *arguments)
    assert status == 2
    (problem,) = report["problems"]
    assert problem["kind"] == kind
    assert text in problem["message"]


def test_the_model_is_checked_as_far_as_it_is_there(
    folder: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(folder, [{"video": "clip.mp4", "prompt": "x"}])
    # Its config alone: 8 heads, which 3 processes cannot share; the 12 of the published model they could.
    settings = folder / "model" / "transformer" / "config.json"
    settings.parent.mkdir(parents=True)
    whole = json.loads((tiny / "transformer" / "config.json").read_text())
    settings.write_text(json.dumps({**whole, "num_attention_heads": 8}))
    status, report = _check(folder, capsys)
    assert status == 0
    assert any("no weights yet" in line for line in report["not_checked"])
    status, report = _check(folder, capsys, "layout.sequence=3", "layout.ulysses=3")
    assert [problem["kind"] for problem in report["problems"]] == ["layout"]
    # Whole: then a run's own check has the last word.
    model = f"model.path={tiny}"
    status, report = _check(folder, capsys, model)
    assert (status, report["not_checked"]) == (0, [])
    status, report = _check(folder, capsys, model, "lora.targets=[to_w]")
    assert [problem["kind"] for problem in report["problems"]] == ["run"]
    assert "'to_w' matches nothing" in report["problems"][0]["message"]
    shutil.copytree(tiny, folder / "broken")
    weights = folder / "broken" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, report = _check(folder, capsys, f"model.path={folder / 'broken'}")
    assert [problem["kind"] for problem in report["problems"]] == ["model"]


def test_sheet_shows_what_the_model_sees(folder: Path, clips: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(folder, [{"video": str(clips / "clip_0.mp4"), "prompt": "a rabbit " * 40}])
    sheet = folder / "sheet.png"
    sizes = ("data.height=128", "data.width=256", "data.frames=9")
    assert _check(folder, capsys, *sizes, f"data.root={clips}", "--sheet", str(sheet))[0] == 0
    pixels = np.asarray(Image.open(sheet).convert("RGB")).astype(int)
    seen = read_frames(clips / "clip_0.mp4", height=128, width=256, frames=9, where="")
    # First, middle and last frame, at their own size, from the margin on.
    for number, frame in enumerate((0, 4, 8)):
        left = 18 + number * (256 + 6)
        assert np.abs(pixels[18 : 18 + 128, left : left + 256] - seen[frame]).max() <= 1
    text = pixels[18 + 128 :]
    assert (text.min(axis=(1, 2)) < 60).sum() > 20  # ink
    with pytest.raises(SystemExit):
        main(["check"])
    assert (
        main(["check", str(folder / "config.yaml"), *sizes, f"data.root={clips}", "--sheet", f"{folder}/no/x.png"]) == 2
    )
    assert "--sheet: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "short", "many words " * 50, "x" * 500, "a " + "y" * 300 + " b"])
def test_captions_are_wrapped_within_their_width(text: str) -> None:
    font = ImageFont.load_default(size=15)
    lines = wrapped(text, font, 200, 3)
    assert 1 <= len(lines) <= 3
    assert all(font.getlength(line) <= 200 for line in lines)
    whole = "".join(lines).replace(" ", "")
    if whole.endswith("..."):
        assert text.replace(" ", "").startswith(whole[:-3])
    else:
        assert whole == text.replace(" ", "")


def test_check_reads_no_weights_and_imports_no_torch(folder: Path) -> None:
    _write(folder, [{"video": "clip.mp4", "prompt": "x"}])
    code = (
        "import sys; from flowshard.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(10 * ('torch' in sys.modules) + status)"
    )
    command = [sys.executable, "-c", code, "check", str(folder / "config.yaml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
