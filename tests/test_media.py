"""Pictures as frames: against Pillow used directly, and against pictures known pixel by pixel."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowshard.data.media import read_frames, resize_and_crop

WHERE = "metadata.csv, row 3 (x)"
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def _noise(height: int, width: int, *channels: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, *channels), dtype=np.uint8)


def _picture(file: Path, height: int = 8, width: int = 8) -> np.ndarray:
    """The one frame of a picture."""
    frames = read_frames(file, height=height, width=width, frames=1, where=WHERE)
    assert frames.shape == (1, height, width, 3)
    assert frames.dtype == np.uint8
    picture: np.ndarray = frames[0]
    return picture


def _saved(image: Image.Image, file: Path, **options: Any) -> Path:
    image.save(file, **options)
    return file


@pytest.mark.parametrize(
    ("source", "size", "scaled"),
    [
        # (height, width) of the picture, of the result, and of the picture at the scale that just covers the result.
        ((48, 96), (32, 32), (32, 64)),
        ((96, 48), (32, 32), (64, 32)),
        ((64, 64), (32, 64), (64, 64)),
        ((64, 64), (64, 32), (64, 64)),
        ((16, 32), (64, 64), (64, 128)),
        ((100, 100), (16, 48), (48, 48)),
        ((180, 320), (176, 320), (180, 320)),
        ((32, 48), (32, 48), (32, 48)),
    ],
)
def test_result_is_the_centre_of_the_picture_scaled_with_its_aspect_kept(
    source: tuple[int, int], size: tuple[int, int], scaled: tuple[int, int]
) -> None:
    # Values far from 0 and 255, as Pillow clips between its passes, whose order depends on the sizes.
    image = Image.fromarray(_noise(*source, 3) // 2 + 64)
    whole = image.resize((scaled[1], scaled[0]), Image.Resampling.LANCZOS)
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    expected = np.asarray(whole.crop((left, top, left + size[1], top + size[0]))).astype(int)
    result = np.asarray(resize_and_crop(image, height=size[0], width=size[1]))
    assert np.abs(result - expected).max() <= 1  # each pass rounds


@pytest.mark.parametrize("upright", [False, True])
def test_cut_is_at_the_centre_to_the_pixel(upright: bool) -> None:
    # Stripes two pixels wide, each of its own grey: 0, 4, 8, ... Of 64 pixels the middle 32 remain.
    stripes = np.repeat(np.arange(32, dtype=np.uint8) * 4, 2)
    pixels = np.broadcast_to(stripes[:, None] if upright else stripes, (64, 32) if upright else (32, 64))
    result = np.asarray(resize_and_crop(Image.fromarray(pixels).convert("RGB"), height=32, width=32))
    line = result[:, 0, 0] if upright else result[0, :, 0]
    assert line.tolist() == stripes[16:48].tolist()


def test_edges_stay_where_scaling_by_two_puts_them() -> None:
    # Quarters of a 40 x 80 picture; the centred 40 x 40 part is halved, so the corners meet in the middle.
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[:20, :40], pixels[:20, 40:], pixels[20:, :40], pixels[20:, 40:] = RED, GREEN, BLUE, WHITE
    result = np.asarray(resize_and_crop(Image.fromarray(pixels), height=20, width=20))
    # Away from the edges, where the filter rings, colours are exact.
    assert [tuple(result[y, x]) for y, x in ((2, 2), (2, 17), (17, 2), (17, 17))] == [RED, GREEN, BLUE, WHITE]
    assert result[2, :, 0].argmin() >= 10
    assert abs(int(result[2, 9, 0]) - 255) < 40
    assert int(result[2, 10, 0]) < 40


@pytest.mark.parametrize("source", [(1, 1), (16, 3000), (3000, 16), (33, 57), (7, 5), (1080, 1920)])
@pytest.mark.parametrize("size", [(16, 16), (32, 48), (48, 32)])
def test_any_size_of_picture_fills_the_result_with_its_own_colour(
    source: tuple[int, int], size: tuple[int, int]
) -> None:
    image = Image.new("RGB", (source[1], source[0]), (10, 200, 90))
    result = np.asarray(resize_and_crop(image, height=size[0], width=size[1]))
    assert result.shape == (*size, 3)
    assert (result == (10, 200, 90)).all()


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "tiff", "PNG"])
def test_lossless_picture_is_read_exactly(tmp_path: Path, suffix: str) -> None:
    pixels = _noise(8, 8, 3)
    assert np.array_equal(_picture(_saved(Image.fromarray(pixels), tmp_path / f"x.{suffix}")), pixels)


def test_lossless_webp_is_read_exactly(tmp_path: Path) -> None:
    pixels = _noise(8, 8, 3)
    assert np.array_equal(_picture(_saved(Image.fromarray(pixels), tmp_path / "x.webp", lossless=True)), pixels)


@pytest.mark.parametrize("suffix", ["jpg", "jpeg"])
def test_jpeg_is_read_as_pillow_reads_it(tmp_path: Path, suffix: str) -> None:
    file = _saved(Image.fromarray(_noise(8, 8, 3)), tmp_path / f"x.{suffix}", quality=90)
    with Image.open(file) as image:
        assert np.array_equal(_picture(file), np.asarray(image))


def test_grey_picture_has_equal_channels(tmp_path: Path) -> None:
    grey = _noise(8, 8)
    assert np.array_equal(_picture(_saved(Image.fromarray(grey), tmp_path / "x.png")), np.stack([grey] * 3, axis=-1))


def test_picture_of_one_bit_is_black_and_white(tmp_path: Path) -> None:
    bits = _noise(8, 8) > 127
    file = _saved(Image.fromarray(bits), tmp_path / "x.png")
    with Image.open(file) as image:
        assert image.mode == "1"
    assert np.array_equal(_picture(file), np.stack([np.where(bits, 255, 0)] * 3, axis=-1))


def test_palette_picture_has_the_colours_of_its_palette(tmp_path: Path) -> None:
    indices = (_noise(8, 8) % 3).astype(np.uint8)
    image = Image.fromarray(indices).convert("P")
    image.putpalette([*RED, *GREEN, *BLUE])
    file = _saved(image, tmp_path / "x.png")
    with Image.open(file) as stored:
        assert stored.mode == "P"
    assert np.array_equal(_picture(file), np.array([RED, GREEN, BLUE])[indices])


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path: Path, suffix: str) -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    file = _saved(Image.fromarray(values), tmp_path / f"x.{suffix}")
    with Image.open(file) as image:
        assert image.mode.startswith("I;16")
    picture = _picture(file).astype(int)
    assert np.abs(picture - (values[..., None] / 257.0)).max() < 1
    assert (picture[0, 0, 0], picture[7, 7, 0]) == (0, 255)


def test_big_endian_sixteen_bit_grey_is_read_the_same(tmp_path: Path) -> None:
    # TIFF by hand: big-endian header, 8 tags, one uncompressed strip of 16-bit samples.
    values = np.linspace(0, 65535, 64).astype(">u2")
    data = 8 + 2 + 8 * 12 + 4
    tags = [(256, 8), (257, 8), (258, 16), (259, 1), (262, 1), (273, data), (277, 1), (279, 128)]
    entries = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    header = b"MM\0*" + struct.pack(">IH", 8, len(tags))
    (tmp_path / "x.tif").write_bytes(header + entries + struct.pack(">I", 0) + values.tobytes())
    picture = _picture(tmp_path / "x.tif")[..., 0].astype(int).ravel()
    assert np.abs(picture - values.astype(int) / 257.0).max() < 1


def test_cmyk_picture_has_the_right_brightness(tmp_path: Path) -> None:
    # Without ink it is white, full black ink is black, and full cyan absorbs red.
    for ink, expected in (((0, 0, 0, 0), WHITE), ((0, 0, 0, 255), (0, 0, 0)), ((255, 0, 0, 0), (0, 255, 255))):
        file = _saved(Image.new("CMYK", (8, 8), ink), tmp_path / "x.jpg", quality=100)
        with Image.open(file) as image:
            assert image.mode == "CMYK"
        assert np.abs(_picture(file).astype(int) - expected).max() <= 3


def _over_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = colour * (alpha / 255.0) + 255.0 * (1 - alpha / 255.0)
    return mixed


def test_colour_below_full_transparency_never_shows(tmp_path: Path) -> None:
    pixels = _noise(8, 8, 4)
    pixels[..., 3] = np.where(np.arange(8) < 4, 0, 255)[None]
    picture = _picture(_saved(Image.fromarray(pixels), tmp_path / "x.png"))
    assert (picture[:, :4] == 255).all()
    assert np.array_equal(picture[:, 4:], pixels[:, 4:, :3])


def test_partial_transparency_is_mixed_with_white(tmp_path: Path) -> None:
    pixels = _noise(8, 8, 4)
    picture = _picture(_saved(Image.fromarray(pixels), tmp_path / "x.png"))
    assert np.abs(picture - _over_white(pixels[..., :3].astype(float), pixels[..., 3:].astype(float))).max() <= 1


def test_hidden_colour_does_not_bleed_into_edges_when_scaled(tmp_path: Path) -> None:
    pixels = np.zeros((32, 32, 4), dtype=np.uint8)
    pixels[...] = (*WHITE, 255)
    pixels[:, :17] = (255, 0, 0, 0)  # hidden red, up to the middle of a pixel of the result
    assert (_picture(_saved(Image.fromarray(pixels), tmp_path / "x.png")) == 255).all()


def test_grey_with_alpha_is_laid_over_white(tmp_path: Path) -> None:
    pixels = _noise(8, 8, 2)
    file = _saved(_la(pixels), tmp_path / "x.png")
    with Image.open(file) as image:
        assert image.mode == "LA"
    expected = _over_white(pixels[..., :1].astype(float), pixels[..., 1:].astype(float))
    assert np.abs(_picture(file) - expected).max() <= 1


def _la(pixels: np.ndarray) -> Image.Image:
    return Image.merge("LA", [Image.fromarray(np.ascontiguousarray(pixels[..., channel])) for channel in range(2)])


def test_transparent_entry_of_a_palette_is_white(tmp_path: Path) -> None:
    indices = (np.arange(64, dtype=np.uint8) % 3).reshape(8, 8)
    image = Image.fromarray(indices).convert("P")
    image.putpalette([*RED, *GREEN, *BLUE])
    picture = _picture(_saved(image, tmp_path / "x.png", transparency=1))
    assert np.array_equal(picture, np.array([RED, WHITE, BLUE])[indices])


@pytest.mark.parametrize(("name", "written_as"), [("x.jpg", "PNG"), ("x.png", "JPEG"), ("x.webp", "PNG")])
def test_format_is_taken_from_the_content_and_not_from_the_name(tmp_path: Path, name: str, written_as: str) -> None:
    file = _saved(Image.new("RGB", (8, 8), (250, 10, 10)), tmp_path / name, format=written_as)
    assert np.abs(_picture(file).astype(int) - (250, 10, 10)).max() <= 3


@pytest.mark.parametrize(
    ("orientation", "corner"),
    # Where the stored top left corner belongs, by the EXIF standard: (row, column) of the upright picture.
    [(1, (0, 0)), (2, (0, 7)), (3, (7, 7)), (4, (7, 0)), (5, (0, 0)), (6, (0, 7)), (7, (7, 7)), (8, (7, 0))],
)
def test_picture_stands_as_its_orientation_says(tmp_path: Path, orientation: int, corner: tuple[int, int]) -> None:
    pixels = np.full((8, 8, 3), 255, dtype=np.uint8)
    pixels[0, 0] = 0
    pixels[0, 1] = RED  # the neighbour to the right tells turned from mirrored
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = _picture(_saved(Image.fromarray(pixels), tmp_path / "x.png", exif=exif))
    assert tuple(picture[corner]) == (0, 0, 0)
    along_a_row = orientation <= 4
    step = 1 if corner[along_a_row] == 0 else -1
    beside = (corner[0], corner[1] + step) if along_a_row else (corner[0] + (1 if corner[0] == 0 else -1), corner[1])
    assert tuple(picture[beside]) == RED


def test_orientation_swaps_the_sides_before_the_cut(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = _noise(16, 8, 3)
    file = _saved(Image.fromarray(pixels), tmp_path / "x.png", exif=exif)
    assert np.array_equal(_picture(file, height=8, width=16), np.rot90(pixels, k=-1))


@pytest.mark.parametrize("frames", [1, 5])
def test_picture_gives_one_frame_whatever_is_asked(tmp_path: Path, frames: int) -> None:
    file = _saved(Image.fromarray(_noise(8, 8, 3)), tmp_path / "x.png")
    assert read_frames(file, height=8, width=8, frames=frames, where=WHERE).shape == (1, 8, 8, 3)
