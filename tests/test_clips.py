"""Clips as frames against PyAV used directly, broken media, and clips that are written."""

import struct
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from flowshard.data.media import read_frames, write_video
from flowshard.errors import UserError

WHERE = "metadata.csv, row 3 (x)"


def _decode(file: Path) -> np.ndarray:
    with av.open(str(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _moving(frames: int, height: int, width: int) -> np.ndarray:
    """A smooth picture that moves, which H.264 keeps closely."""
    time, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    waves = [np.sin(x / 9 + time / 2), np.cos(y / 7 - time / 3), np.sin((x + y) / 11)]
    return (127.5 + 100 * np.stack(waves, axis=-1)).astype(np.uint8)


def _refusal(file: Path, frames: int = 1) -> str:
    with pytest.raises(UserError) as raised:
        read_frames(file, height=16, width=16, frames=frames, where=WHERE)
    message = str(raised.value)
    assert message.startswith(f"{WHERE}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("frames", [1, 5, 33])
def test_first_frames_of_a_clip_equal_a_direct_decode(clips: Path, frames: int) -> None:
    file = clips / "clip_0.mp4"
    decoded = _decode(file)
    assert decoded.shape == (33, 176, 320, 3)
    found = read_frames(file, height=176, width=320, frames=frames, where=WHERE)
    assert np.array_equal(found, decoded[:frames])


def test_every_frame_is_resized_and_cropped_alike(clips: Path) -> None:
    file = clips / "clip_1.mp4"
    # 176 x 320 halved is 88 x 160, of which 16 columns on either side are cut.
    expected = [
        np.asarray(Image.fromarray(frame).resize((160, 88), Image.Resampling.LANCZOS).crop((16, 0, 144, 88)))
        for frame in _decode(file)[:5]
    ]
    assert np.array_equal(read_frames(file, height=88, width=128, frames=5, where=WHERE), np.stack(expected))


def test_clip_as_long_as_asked_is_read_and_a_frame_more_is_refused(clips: Path) -> None:
    file = clips / "clip_0.mp4"
    assert len(read_frames(file, height=16, width=16, frames=33, where=WHERE)) == 33
    message = _refusal(file, frames=37)
    assert message.startswith(f"{WHERE}: has 33 frames, data.frames asks for 37; ")


@pytest.mark.parametrize(
    ("turn", "matrix"),
    # Display matrices of the MP4 format: x' = a x + c y, y' = b x + d y with (a, b, 0, c, d, 0, ...), y downwards.
    [(0, (1, 0, 0, 1)), (-1, (0, 1, -1, 0)), (2, (-1, 0, 0, -1)), (1, (0, -1, 1, 0))],
    ids=["upright", "clockwise", "upside-down", "counter-clockwise"],
)
def test_clip_of_a_turned_camera_stands_upright(tmp_path: Path, turn: int, matrix: tuple[int, ...]) -> None:
    file = tmp_path / "x.mp4"
    write_video(file, _moving(3, 32, 64), fps=8)
    stored = _decode(file)
    content = bytearray(file.read_bytes())
    # In a `tkhd` box of version 0 the matrix of nine 16.16 numbers starts 48 bytes after the box.
    start = content.index(b"tkhd") - 4 + 48
    a, b, c, d = (value * 0x10000 for value in matrix)
    assert struct.unpack(">9i", content[start : start + 36]) == (0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    content[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 0x40000000)
    file.write_bytes(content)
    expected = np.rot90(stored, k=turn, axes=(1, 2))
    height, width = expected.shape[1:3]
    assert np.array_equal(read_frames(file, height=height, width=width, frames=3, where=WHERE), expected)


def test_animated_gif_is_a_clip(tmp_path: Path) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    first, *others = [Image.new("RGB", (16, 16), colour) for colour in colours]
    file = tmp_path / "x.gif"
    first.save(file, save_all=True, append_images=others, duration=100)
    found = read_frames(file, height=16, width=16, frames=4, where=WHERE)
    assert np.array_equal(found, np.stack([np.full((16, 16, 3), colour, np.uint8) for colour in colours]))
    assert "has 4 frames, data.frames asks for 5" in _refusal(file, frames=5)


def test_name_with_other_scripts_is_opened(tmp_path: Path, clips: Path) -> None:
    file = tmp_path / "兔子 #1 %20 🐇.mp4"
    file.write_bytes((clips / "clip_0.mp4").read_bytes())
    assert len(read_frames(file, height=16, width=16, frames=1, where=WHERE)) == 1


@pytest.mark.parametrize("name", ["x.mp4", "x.png", "x.jpg", "x.webp", "x.gif"])
@pytest.mark.parametrize(
    "content",
    [b"", b"this is text, not a medium\n" * 50, bytes(1000), b"DDS " + struct.pack("<I", 124) + bytes(200)],
    ids=["empty", "text", "zeros", "unknown-pixel-format"],
)
def test_file_that_is_no_medium_is_refused_with_its_row(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert "cannot be decoded" in _refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["x.mp4", "x.png"])
def test_file_that_is_gone_is_refused_with_its_row(tmp_path: Path, name: str) -> None:
    assert "cannot be decoded" in _refusal(tmp_path / name)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tif"])
@pytest.mark.parametrize("part", [0.05, 0.3, 0.9])
def test_truncated_picture_is_refused_with_its_row(tmp_path: Path, suffix: str, part: float) -> None:
    file = tmp_path / f"x.{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    assert "cannot be decoded" in _refusal(file)


def _without_index(content: bytes) -> bytes:
    return content.replace(b"moov", b"none")


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize("damage", [_without_index, _cut])
def test_damaged_clip_is_refused_with_its_row(tmp_path: Path, clips: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "x.mp4"
    file.write_bytes(damage((clips / "clip_0.mp4").read_bytes()))
    _refusal(file, frames=33)


@pytest.mark.parametrize("kind", [1, 2, 5])
@pytest.mark.parametrize("tag", [0x010E, 0x0111])
def test_notes_of_a_camera_that_make_no_sense_are_ignored_or_refused_with_the_row(
    tmp_path: Path, tag: int, kind: int
) -> None:
    # An EXIF block of two entries: a turn, which has to be applied, and an entry whose type is not what Pillow expects.
    turn = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    entry = struct.pack("<HHII", tag, kind, 1, 38)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + turn + entry + bytes(4) + bytes(range(1, 17))
    file = tmp_path / "x.jpg"
    pixels = np.full((32, 16, 3), 255, dtype=np.uint8)
    pixels[:16] = 0
    Image.fromarray(pixels).save(file, exif=exif)
    try:
        frame = read_frames(file, height=16, width=32, frames=1, where=WHERE)[0]
    except UserError as error:
        assert str(error).startswith(f"{WHERE}: ")
    else:
        assert frame[:, :8].min() > 200  # turned clockwise: the dark upper half is on the right
        assert frame[:, -8:].max() < 50


def test_sound_without_pictures_is_refused_with_its_row(tmp_path: Path) -> None:
    file = tmp_path / "x.mp4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert "no video stream" in _refusal(file)


@pytest.mark.parametrize(("frames", "height", "width", "fps"), [(5, 64, 96, 8), (1, 32, 32, 16), (9, 34, 46, 24)])
def test_written_clip_is_read_with_its_frames_size_and_rate(
    tmp_path: Path, frames: int, height: int, width: int, fps: int
) -> None:
    pixels = _moving(frames, height, width)
    file = tmp_path / "x.mp4"
    write_video(file, pixels, fps=fps)
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == fps
    decoded = _decode(file)
    assert decoded.shape == pixels.shape
    assert np.abs(decoded.astype(float) - pixels).mean() < 4


def test_frames_are_written_in_order(tmp_path: Path) -> None:
    greys = [20, 200, 60, 160, 100, 240]
    pixels = np.stack([np.full((32, 32, 3), grey, dtype=np.uint8) for grey in greys])
    write_video(tmp_path / "x.mp4", pixels, fps=8)
    assert np.abs(_decode(tmp_path / "x.mp4").mean(axis=(1, 2, 3)) - greys).max() < 4


@pytest.mark.parametrize(("height", "width"), [(33, 57), (1, 1), (17, 300)])
def test_clip_of_an_odd_size_is_read(tmp_path: Path, height: int, width: int) -> None:
    file = tmp_path / "x.mov"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("png", rate=8)
        stream.height, stream.width, stream.pix_fmt = height, width, "rgb24"
        pixels = np.random.default_rng(0).integers(0, 256, (3, height, width, 3), dtype=np.uint8)
        for picture in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    # Lossless, so each frame is the picture that was written.
    assert np.array_equal(read_frames(file, height=height, width=width, frames=3, where=WHERE), pixels)


def test_format_is_mp4_whatever_the_name(tmp_path: Path) -> None:
    write_video(tmp_path / ".x.mp4.1.partial", _moving(2, 32, 32), fps=8)
    with av.open(str(tmp_path / ".x.mp4.1.partial")) as container:
        assert "mp4" in container.format.name
