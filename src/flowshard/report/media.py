"""Pictures and clips as text, to stand inside the page."""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from flowshard.data.media import stills
from flowshard.errors import UserError

_SIDE = 320
"""Pixels of the longer side of a picture in the page."""
_CLIPS_BYTES = 300_000
"""All clips of a run together, up to which they are in the page themselves and not as their middle frame."""


def as_clips(files: Sequence[Path]) -> bool:
    """Whether the clips among the files are few enough to be in the page."""
    return sum(file.stat().st_size for file in files if file.suffix == ".mp4") <= _CLIPS_BYTES


def element(file: Path, description: str, *, clips: bool) -> str:
    """The HTML element that shows a sample, without a reference to any file.

    Args:
        file: picture or clip.
        description: for those who do not see it.
        clips: whether a clip is shown as such, and not its middle frame.
    """
    try:
        picture = stills(file)[0]
    except UserError as error:
        return f'<p class="note">{escape(str(error))}</p>'
    picture.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=88)
    still = _uri("image/jpeg", buffer.getvalue())
    if clips and file.suffix == ".mp4":
        clip = _uri("video/mp4", file.read_bytes())
        how = 'preload="none" tabindex="0" loop muted playsinline'
        return f'<video src="{clip}" poster="{still}" aria-label="{escape(description)}" {how}></video>'
    return f'<img src="{still}" alt="{escape(description)}">'


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
