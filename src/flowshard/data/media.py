"""Decoding clips and pictures into frames of the configured size, and writing them.

Training, caching and conditions all come through `read_frames`, so there is one way a picture is cut.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import ExifTags, Image, ImageOps

from flowshard.data.clips import Cut, TooShortError, read_clip
from flowshard.data.problems import DataError
from flowshard.errors import UserError
from flowshard.families.variant import Input, Inputs

MEDIA_VERSION = 1
"""Raised whenever `read_frames` gives other pixels, so that no stale encoded sample is used."""
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
CLIP_SUFFIXES = frozenset(
    {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts", ".gif"}
)
WHOLE = Cut()
"""The first frames of the whole clip."""
_SPREAD = Cut(sampling="even")
BACKGROUND = (255, 255, 255)
"""What shows through transparent pixels."""


def is_image(path: Path) -> bool:
    """Whether the file is a still picture, by its name; everything else (GIF too) is decoded as a clip."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def is_medium(path: Path) -> bool:
    """Whether the file is a picture or clip, by its name."""
    return path.suffix.lower() in IMAGE_SUFFIXES | CLIP_SUFFIXES


def read_frames(
    path: Path | Sequence[Path], *, height: int, width: int, frames: int, where: str, cut: Cut = WHOLE
) -> np.ndarray:
    """Frames of a clip, or the one of a picture, resized and cropped at the centre.

    Args:
        path: the medium; several pictures are a clip.
        height: height of the result in pixels.
        width: width of the result in pixels.
        frames: frames of a clip; a picture always gives one.
        where: names the sample (file and row) in messages.
        cut: which frames of a clip are taken.

    Returns:
        uint8 RGB of shape (frames, height, width, 3); of a short clip fewer frames if `cut` says so.

    Raises:
        UserError: the medium cannot be decoded, or is a clip with fewer frames than asked.
    """

    def resized(picture: Image.Image) -> np.ndarray:
        return np.asarray(resize_and_crop(picture, height=height, width=width))

    try:
        if not isinstance(path, Path):
            found = {place: resized(read_picture(path[place], where=where)) for place in cut.places(len(path), frames)}
            return np.stack([found[place] for place in cut.places(len(path), frames)])
        return np.stack([resized(_image(path))] if is_image(path) else read_clip(path, frames, cut, resized))
    except TooShortError as short:
        rate = "" if cut.fps is None else f" at {cut.fps:g} a second"
        part = "" if not cut.start and cut.end is None else " from start to end"
        raise DataError(
            "too short",
            f"{where}: has {short.available} frames{rate}{part}, data.frames asks for {frames}; lower data.frames, remove "
            "the row or set data.short",
        ) from None
    except UserError:
        raise
    except Exception as error:
        # Pillow's readers raise almost anything: SyntaxError, struct.error, AttributeError, NotImplementedError, RuntimeError.
        reason = " ".join(str(error).split())
        raise DataError(
            "not decodable", f"{where}: cannot be decoded ({reason}); replace the file or remove the row"
        ) from None


def read_inputs(
    inputs: Sequence[Input],
    files: Mapping[str, Sequence[Path]],
    *,
    own: np.ndarray | None,
    height: int,
    width: int,
    frames: int,
    where: str,
    cut: Cut = WHOLE,
) -> Inputs:
    """What a model gets besides the prompt, decoded.

    Args:
        inputs: what it can get.
        files: the files of each, by column.
        own: frames of the sample itself, which stand in for pictures that no file is given for.
        height: of pictures and clips in pixels.
        width: of pictures and clips in pixels.
        frames: of clips, if there is no `own`.
        where: names the sample in messages.
        cut: which frames of clips are taken.

    Raises:
        UserError: a file cannot be decoded; the message names it.
    """
    found: dict[str, Any] = {}
    for one in inputs:
        place = f"{where}, {one.column}"
        paths = files.get(one.column, ())
        if not paths:
            if one.from_clip is not None and own is not None:
                found[one.column] = own[:1] if one.from_clip == "first" else own[-1:]
        elif one.kind == "images":
            found[one.column] = [read_picture(path, where=place) for path in paths]
        else:
            count, part = (frames if own is None else len(own), cut) if one.kind == "video" else (1, WHOLE)
            found[one.column] = read_frames(paths[0], height=height, width=width, frames=count, where=place, cut=part)
    return found


def read_picture(path: Path, *, where: str) -> Image.Image:
    """A picture in its own size, or the first one of a clip.

    Raises:
        UserError: it cannot be decoded.
    """
    try:
        return _image(path) if is_image(path) else read_clip(path, 1, WHOLE, Image.Image.copy)[0]
    except TooShortError:
        raise DataError("not decodable", f"{where}: {path} holds no picture; replace the file") from None
    except Exception as error:  # as in `read_frames`
        reason = " ".join(str(error).split())
        raise DataError("not decodable", f"{where}: {path} cannot be decoded ({reason}); replace the file") from None


def picture_size(path: Path, *, where: str) -> tuple[int, int]:
    """Width and height of what `read_picture` gives, of a still picture without decoding it.

    Raises:
        UserError: it cannot be decoded.
    """
    if not is_image(path):
        return read_picture(path, where=where).size
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) > 4  # a quarter turn, mirrored or not
            return image.size[::-1] if turned else image.size
    except Exception as error:  # as in `read_frames`
        reason = " ".join(str(error).split())
        raise DataError("not decodable", f"{where}: {path} cannot be decoded ({reason}); replace the file") from None


def stills(path: Path, frames: int = 1) -> list[Image.Image]:
    """A picture, or frames of a clip, evenly spread from first to last, as RGB in their own size.

    Args:
        path: the medium.
        frames: how many of a clip; one is that in the middle.

    Raises:
        UserError: the file cannot be decoded, or is a clip with fewer frames.
    """
    try:
        return [_image(path)] if is_image(path) else read_clip(path, frames, _SPREAD, Image.Image.copy)
    except Exception as error:  # as in `read_frames`
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be decoded ({reason}); replace the file") from None


def _image(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return to_rgb(ImageOps.exif_transpose(image))


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as 8-bit RGB: 16-bit is scaled, not clipped; transparency is laid over `BACKGROUND`."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        values = np.asarray(image).astype(np.float64)
        image = Image.fromarray(np.clip(values / (257.0 if image.mode == "I" else 1.0), 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*BACKGROUND, 255)), image)
    return image.convert("RGB")


def resize_and_crop(image: Image.Image, *, height: int, width: int) -> Image.Image:
    """The largest centred part with the aspect ratio of the result, resampled to `height` x `width` pixels."""
    scale = max(width / image.width, height / image.height)
    part_width, part_height = min(width / scale, image.width), min(height / scale, image.height)
    left, top = (image.width - part_width) / 2, (image.height - part_height) / 2
    box = (left, top, left + part_width, top + part_height)
    return image.resize((width, height), Image.Resampling.LANCZOS, box=box)


def write_video(path: Path, frames: np.ndarray, *, fps: int) -> None:
    """Write H.264 in an MP4.

    Args:
        path: the file.
        frames: uint8 RGB of shape (frames, height, width, 3); height and width are even.
        fps: frames a second.
    """
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "16"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
