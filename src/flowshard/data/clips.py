"""Which frames of a clip are taken, and taking them without decoding the rest."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import av
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

Sampling = Literal["prefix", "even", "random"]
Short = Literal["refuse", "trim", "repeat"]
_CLOSE = 1e-3
"""Seconds by which times may differ that are meant to be equal: containers round them, some to milliseconds."""
_FRAMES_READ_THROUGH = 8
"""Decoding so many frames that are not wanted costs less than looking for the next key frame."""
T = TypeVar("T")


@dataclass(frozen=True)
class Cut:
    """Which frames of a clip are taken."""

    fps: float | None = None
    """Frames a second, by the time at which they are shown; None takes frames one after another as they are stored."""
    sampling: Sampling = "prefix"
    """The first frames, frames evenly spread over the whole, or successive frames from a random place."""
    short: Short = "refuse"
    """What becomes of a clip with fewer frames than asked."""
    stride: int = 1
    """`trim` leaves stride * k + 1 frames."""
    start: float = 0.0
    """Seconds into the clip at which it begins."""
    end: float | None = None
    """Seconds into the clip at which it ends; None is its end."""
    draw: float = 0.0
    """In [0, 1): the place that `random` takes."""

    def key(self) -> dict[str, Any]:
        """What the frames depend on: nothing for the first frames of a whole clip."""
        own: dict[str, Any] = {"fps": self.fps, "start": self.start or None, "end": self.end}
        if self.sampling != "prefix":
            own["sampling"] = self.sampling
        if self.sampling == "random":
            own["draw"] = self.draw
        if self.short != "refuse":
            own["short"] = [self.short, self.stride]
        return {name: value for name, value in own.items() if value is not None}

    def places(self, available: int, frames: int) -> list[int]:
        """Which of the frames that there are are taken, in the order of the result.

        Raises:
            TooShortError: there are not enough.
        """
        if available < frames:
            if self.short == "refuse" or available == 0:
                raise TooShortError(available)
            if self.short == "repeat":
                return [min(number, available - 1) for number in range(frames)]
            frames = (available - 1) // self.stride * self.stride + 1
        if self.sampling == "even":
            if frames == 1:
                return [(available - 1) // 2]
            return [round(number * (available - 1) / (frames - 1)) for number in range(frames)]
        first = int(self.draw * (available - frames + 1)) if self.sampling == "random" else 0
        return list(range(first, first + frames))


class TooShortError(Exception):
    """A clip has fewer frames than asked."""

    def __init__(self, available: int) -> None:
        super().__init__(available)
        self.available = available


@dataclass(frozen=True)
class ClipFacts:
    """What a clip is, by its packets."""

    width: int
    height: int
    frames: int
    fps: float
    """Frames over duration, so the mean rate if it varies."""


def read_clip(path: Path, frames: int, cut: Cut, convert: Callable[[Image.Image], T]) -> list[T]:
    """Frames of a clip, upright, in RGB.

    Nothing before the key frame ahead of the first frame taken is decoded, and nothing after the last.

    Args:
        path: the clip.
        frames: how many.
        cut: which.
        convert: what becomes of each at once, as a frame in its own size may be large.

    Raises:
        TooShortError: it has fewer frames than asked, and `cut.short` is `refuse`.
        Exception: whatever the decoder raises.
    """
    with Clip(path) as clip:
        if cut.sampling == "prefix":
            found = _first(clip, frames, cut, convert)
            return found if len(found) == frames else [found[place] for place in cut.places(len(found), frames)]
        try:
            return _at(clip, clip.shown_from_packets(), frames, cut, convert)
        except _MissingFrameError:  # packets that gave no picture: what counts is what can be decoded
            return _at(clip, clip.shown_from_frames(), frames, cut, convert)


def clip_facts(path: Path) -> ClipFacts:
    """Size, frames and rate of a clip, without decoding it.

    Raises:
        Exception: whatever the reader raises.
    """
    with Clip(path) as clip:
        shown = clip.shown_from_packets()
        first = next(clip.frames_from(0.0), None)
        if first is None or not shown.times:
            raise ValueError("no picture")
        picture = _upright(first[1])
        return ClipFacts(*picture.size, frames=len(shown.times), fps=len(shown.times) / max(shown.end, _CLOSE))


@dataclass(frozen=True)
class _Shown:
    """When the frames of a clip are shown, in seconds from its first."""

    times: list[float]
    keys: list[float]
    """Of frames that need no other."""
    end: float
    """When the last is over."""


class _MissingFrameError(Exception):
    """A frame that a packet promised was not decoded."""


class Clip:
    """An opened clip. Times are seconds from its first frame."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._container = av.open(str(self._path))
        self._begun = False
        try:
            if not self._container.streams.video:
                raise ValueError("no video stream")
            self._stream: VideoStream = self._container.streams.video[0]
            self._stream.thread_type = "AUTO"
            base = self._stream.time_base
            self._unit = float(base) if base else 0.0
            rate = self._stream.average_rate or self._stream.base_rate
            self.period = 1.0 / float(rate) if rate else 0.04
            self._origin = self._stream.start_time or 0
        except BaseException:
            self._container.close()
            raise

    def __enter__(self) -> Clip:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._container.close()

    def frames_from(self, seconds: float) -> Iterator[tuple[float, VideoFrame]]:
        """Times and frames, from a key frame at or before this time on to the end."""
        if seconds > _CLOSE and self._unit:
            try:
                self._container.seek(self._origin + int(seconds / self._unit), stream=self._stream, backward=True)
            except av.error.FFmpegError:  # a container that cannot be searched is read from its beginning
                pass
            else:
                self._begun = True
                frames = self._decoded()
                first = next(frames, None)
                # A container may lead to a frame after the wanted one, or to one that needs others before it.
                if first is not None and first[0] <= seconds + _CLOSE and first[1].key_frame:
                    yield first
                    yield from frames
                    return
        self._rewind()
        yield from self._decoded()

    def shown_from_packets(self) -> _Shown:
        """The times by the packets, which are read but not decoded."""
        self._rewind()
        found: list[tuple[int, int, bool]] = []
        for packet in self._container.demux(self._stream):
            if packet.size and not packet.is_discard:
                if packet.pts is None:
                    return self.shown_from_frames()
                found.append((packet.pts, packet.duration or 0, packet.is_keyframe))
        return self._shown(
            [(self._seconds(pts), key) for pts, _, key in found], max(found)[1] * self._unit if found else 0.0
        )

    def shown_from_frames(self) -> _Shown:
        """The times by decoding everything."""
        found, length = [], 0.0
        for seconds, frame in self.frames_from(0.0):
            found.append((seconds, frame.key_frame))
            length = (frame.duration or 0) * self._unit
        return self._shown(found, length)

    def length_of(self, frame: VideoFrame) -> float:
        """How long a frame is shown."""
        return (frame.duration or 0) * self._unit or self.period

    def _shown(self, found: Sequence[tuple[float, bool]], length: float) -> _Shown:
        times = sorted(seconds for seconds, _ in found)
        keys = sorted(seconds for seconds, key in found if key)
        return _Shown(times, keys, (times[-1] if times else 0.0) + (length or self.period))

    def _seconds(self, pts: int) -> float:
        return (pts - self._origin) * self._unit

    def _rewind(self) -> None:
        if self._begun:
            self._container.close()
            self._open()
        self._begun = True

    def _decoded(self) -> Iterator[tuple[float, VideoFrame]]:
        for number, frame in enumerate(self._container.decode(self._stream)):
            yield number * self.period if frame.pts is None else self._seconds(frame.pts), frame


def _first(clip: Clip, frames: int, cut: Cut, convert: Callable[[Image.Image], T]) -> list[T]:
    """The first frames of the cut, as many as there are up to `frames`."""
    end = math.inf if cut.end is None else cut.end
    found: list[T] = []
    if cut.fps is None:
        for seconds, frame in clip.frames_from(cut.start):
            if seconds >= end - _CLOSE:
                break
            if seconds >= cut.start - _CLOSE:
                found.append(convert(_upright(frame)))
            if len(found) == frames:
                break
        return found
    shown: VideoFrame | None = None
    over = 0.0
    for seconds, frame in clip.frames_from(cut.start):
        # What is shown is shown until this one comes.
        if shown is not None:
            _take(found, shown, min(seconds, end), frames, cut, convert)
        if len(found) == frames or seconds >= end:
            return found
        shown, over = frame, seconds + clip.length_of(frame)
    if shown is not None:
        _take(found, shown, min(over, end), frames, cut, convert)
    return found


def _take(
    found: list[T], shown: VideoFrame, until: float, frames: int, cut: Cut, convert: Callable[[Image.Image], T]
) -> None:
    """Add a frame as often as one is due before this time."""
    made: list[T] = []
    while len(found) < frames and _due(cut, len(found)) < until - _CLOSE:
        made = made or [convert(_upright(shown))]
        found += made


def _due(cut: Cut, number: int) -> float:
    """When the n-th frame at a given rate is due."""
    assert cut.fps is not None  # noqa: S101
    return cut.start + number / cut.fps


def _at(clip: Clip, shown: _Shown, frames: int, cut: Cut, convert: Callable[[Image.Image], T]) -> list[T]:
    """Frames of a clip whose times are known."""
    end = shown.end if cut.end is None else min(cut.end, shown.end)
    if not shown.times:
        raise TooShortError(0)
    if cut.fps is None:
        offered = [time for time in shown.times if cut.start - _CLOSE <= time < end - _CLOSE]
    else:
        due = [_due(cut, number) for number in range(max(math.ceil((end - cut.start - _CLOSE) * cut.fps), 0))]
        offered = [shown.times[max(bisect_right(shown.times, time + _CLOSE) - 1, 0)] for time in due]
    wanted = [offered[place] for place in cut.places(len(offered), frames)]
    made: dict[float, T] = {}
    stream: Iterator[tuple[float, VideoFrame]] = iter(())
    position = -math.inf
    for time in sorted(set(wanted)):
        key = shown.keys[max(bisect_right(shown.keys, time + _CLOSE) - 1, 0)] if shown.keys else 0.0
        if key > position + _FRAMES_READ_THROUGH * clip.period:
            stream = clip.frames_from(time)
        found = next(((seconds, frame) for seconds, frame in stream if seconds >= time - _CLOSE), None)
        if found is None or found[0] > time + _CLOSE:
            raise _MissingFrameError
        position = found[0]
        made[time] = convert(_upright(found[1]))
    return [made[time] for time in wanted]


def _upright(frame: VideoFrame) -> Image.Image:
    picture = frame.to_image()
    # `rotation` counts counter-clockwise degrees to turn the stored picture by so that it stands upright.
    return picture.rotate(frame.rotation, expand=True) if frame.rotation else picture
