"""What models get besides the prompt: columns of the metadata, and the frames of the clip that stand in for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowshard.data.clips import Cut
from flowshard.data.media import read_frames, read_inputs
from flowshard.data.metadata import read_metadata
from flowshard.errors import UserError
from flowshard.families.variant import Input

FIRST = Input("input_image", "image", from_clip="first")
LAST = Input("end_image", "image", from_clip="last")
EDIT = Input("edit_image", "images", several=True)
CONTROL = Input("control_video", "video")
MASK = Input("mask", "video", required=False)
SIZE: dict[str, Any] = {"height": 48, "width": 32, "frames": 5, "where": "row 1"}


@pytest.fixture
def data(clips: Path, tmp_path: Path) -> Path:
    """A clip and two pictures of different size."""
    (tmp_path / "clip.mp4").symlink_to(clips / "clip_0.mp4")
    for name, size in (("a.png", (40, 20)), ("b.png", (16, 64))):
        Image.new("RGB", size, (200, 10, 30)).save(tmp_path / name)
    return tmp_path


def _metadata(data: Path, rows: list[dict[str, Any]], form: str = "json") -> Path:
    file = data / f"metadata.{form}"
    if form == "csv":
        columns = list(rows[0])
        quoted = [",".join('"' + str(row[column]).replace('"', '""') + '"' for column in columns) for row in rows]
        file.write_text("\n".join([",".join(columns), *quoted]))
    else:
        file.write_text(json.dumps(rows))
    return file


@pytest.mark.parametrize(
    ("cell", "names"), [("a.png", ["a.png"]), (["a.png", "b.png"], ["a.png", "b.png"]), ('["b.png"]', ["b.png"])]
)
def test_a_cell_names_one_file_or_several(data: Path, cell: Any, names: list[str]) -> None:
    file = _metadata(data, [{"video": "clip.mp4", "prompt": "x", "edit_image": cell}])
    row = read_metadata(file, inputs=[EDIT]).rows[0]
    assert row.inputs == {"edit_image": tuple(data / name for name in names)}
    assert row.files == (data / "clip.mp4", *row.inputs["edit_image"])
    assert read_metadata(file).notes == (f"{file}: unused columns: edit_image",)


def test_a_list_in_a_csv_cell_is_json(data: Path) -> None:
    rows = [{"video": "clip.mp4", "prompt": "x", "edit_image": '["a.png", "b.png"]'}]
    row = read_metadata(_metadata(data, rows, "csv"), inputs=[EDIT]).rows[0]
    assert [file.name for file in row.inputs["edit_image"]] == ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("row", "inputs", "message"),
    [
        ({}, EDIT, "the column 'edit_image' is missing, which this model needs; found 'video', 'prompt'"),
        ({"edit_image": ""}, EDIT, "row 1: has no 'edit_image', which this model needs"),
        ({"edit_image": 3}, EDIT, "row 1: 'edit_image' must be a file or a list of files, not 3"),
        ({"edit_image": ["a.png", 3]}, EDIT, "row 1: 'edit_image' must be a file or a list of files"),
        ({"edit_image": "[a.png]"}, EDIT, "row 1: 'edit_image' is no list of files"),
        ({"edit_image": "no.png"}, EDIT, "media of 1 of 1 rows do not exist"),
        ({"edit_image": "../a.png"}, EDIT, "lies outside the data folder"),
        ({"input_image": ["a.png", "b.png"]}, FIRST, "row 1: 'input_image' takes one file, not 2"),
    ],
)
def test_what_is_wrong_is_named(data: Path, row: dict[str, Any], inputs: Input, message: str) -> None:
    file = _metadata(data, [{"video": "clip.mp4", "prompt": "x", **row}])
    with pytest.raises(UserError) as error:
        read_metadata(file, inputs=[inputs])
    assert message in str(error.value)


def test_frames_of_the_clip_stand_in_for_pictures(data: Path) -> None:
    own = read_frames(data / "clip.mp4", **SIZE)
    found = read_inputs([FIRST, LAST, MASK], {}, own=own, **SIZE)
    assert list(found) == ["input_image", "end_image"]
    assert np.array_equal(found["input_image"], own[:1])
    assert np.array_equal(found["end_image"], own[4:])
    assert read_inputs([FIRST], {}, own=None, **SIZE) == {}


def test_files_are_decoded_at_the_size_of_the_run_or_their_own(data: Path) -> None:
    files = {
        "input_image": (data / "a.png",),
        "edit_image": (data / "a.png", data / "b.png", data / "clip.mp4"),
        "control_video": (data / "clip.mp4",),
    }
    found = read_inputs([FIRST, EDIT, CONTROL], files, own=None, **SIZE)
    assert found["input_image"].shape == (1, 48, 32, 3)
    assert [picture.size for picture in found["edit_image"]] == [(40, 20), (16, 64), (320, 176)]
    assert np.array_equal(found["control_video"], read_frames(data / "clip.mp4", **SIZE))


def test_a_broken_file_is_named_with_its_column(data: Path) -> None:
    (data / "a.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"row 1, edit_image: .*a.png cannot be decoded"):
        read_inputs([EDIT], {"edit_image": (data / "a.png",)}, own=None, **SIZE)


def test_clips_of_inputs_are_cut_like_the_sample(data: Path) -> None:
    cut = Cut(sampling="even", start=0.2)
    own = read_frames(data / "clip.mp4", **SIZE, cut=cut)
    found = read_inputs([CONTROL], {"control_video": (data / "clip.mp4",)}, own=own, **SIZE, cut=cut)
    assert np.array_equal(found["control_video"], own)
    assert not np.array_equal(own, read_frames(data / "clip.mp4", **SIZE))
    # As many as the sample has: a picture takes one.
    found = read_inputs([CONTROL], {"control_video": (data / "clip.mp4",)}, own=own[:1], **SIZE)
    assert len(found["control_video"]) == 1
