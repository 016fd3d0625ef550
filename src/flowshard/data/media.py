"""Decoding clips and pictures into frames of the configured size, and writing them.

Training, caching and conditions all come through `read_frames`, so there is one way a picture is cut.
"""

from collections.abc import Generator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import ExifTags, Image, ImageOps

from flowshard.errors import UserError
from flowshard.families.base import Input, Inputs

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
BACKGROUND = (255, 255, 255)
"""What shows through transparent pixels."""


def is_image(path: Path) -> bool:
    """Whether the file is a still picture, by its name; everything else (GIF too) is decoded as a clip."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def read_frames(path: Path, *, height: int, width: int, frames: int, where: str) -> np.ndarray:
    """The first frames of a clip, or the one of a picture, resized and cropped at the centre.

    Args:
        path: the medium.
        height: height of the result in pixels.
        width: width of the result in pixels.
        frames: frames of a clip; a picture always gives one.
        where: names the sample (file and row) in messages.

    Returns:
        uint8 RGB of shape (frames, height, width, 3).

    Raises:
        UserError: the medium cannot be decoded, or is a clip with fewer frames than asked.
    """
    pictures = []
    try:
        source = _image(path) if is_image(path) else _video(path)
        for picture in source:
            pictures.append(np.asarray(resize_and_crop(picture, height=height, width=width)))
            if len(pictures) == frames:
                break
        source.close()
    except Exception as error:
        # Pillow's readers raise almost anything: SyntaxError, struct.error, AttributeError, NotImplementedError, RuntimeError.
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: cannot be decoded ({reason}); replace the file or remove the row") from None
    if not pictures:
        raise UserError(f"{where}: holds no picture; replace the file or remove the row")
    if not is_image(path) and len(pictures) < frames:
        raise UserError(
            f"{where}: has {len(pictures)} frames, data.frames asks for {frames}; lower data.frames or remove the row"
        )
    return np.stack(pictures)


def read_inputs(
    inputs: Sequence[Input],
    files: Mapping[str, Sequence[Path]],
    *,
    own: np.ndarray | None,
    height: int,
    width: int,
    frames: int,
    where: str,
) -> Inputs:
    """What a model gets besides the prompt, decoded.

    Args:
        inputs: what it can get.
        files: the files of each, by column.
        own: frames of the sample itself, which stand in for pictures that no file is given for.
        height: of pictures and clips in pixels.
        width: of pictures and clips in pixels.
        frames: of clips.
        where: names the sample in messages.

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
            count = frames if one.kind == "video" else 1
            found[one.column] = read_frames(paths[0], height=height, width=width, frames=count, where=place)
    return found


def read_picture(path: Path, *, where: str) -> Image.Image:
    """A picture in its own size, or the first one of a clip.

    Raises:
        UserError: it cannot be decoded.
    """
    try:
        source = _image(path) if is_image(path) else _video(path)
        picture = next(source)
        source.close()
    except Exception as error:  # as in `read_frames`
        reason = " ".join(str(error).split()) or "it holds no picture"
        raise UserError(f"{where}: {path} cannot be decoded ({reason}); replace the file") from None
    return picture


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
        raise UserError(f"{where}: {path} cannot be decoded ({reason}); replace the file") from None


def middle_frame(path: Path) -> Image.Image:
    """A picture, or the frame in the middle of a clip, as RGB in its own size.

    Raises:
        UserError: the file cannot be decoded.
    """
    try:
        if is_image(path):
            return next(_image(path))
        with av.open(str(path)) as container:
            count = sum(1 for _ in container.decode(video=0))
        return next(islice(_video(path), count // 2, None))
    except Exception as error:  # as in `read_frames`
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be decoded ({reason}); replace the file") from None


def _image(path: Path) -> Generator[Image.Image, None, None]:
    with Image.open(path) as image:
        yield to_rgb(ImageOps.exif_transpose(image))


def _video(path: Path) -> Generator[Image.Image, None, None]:
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError("no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            picture = frame.to_image()
            # `rotation` counts counter-clockwise degrees to turn the stored picture by so that it stands upright.
            yield picture.rotate(frame.rotation, expand=True) if frame.rotation else picture


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
