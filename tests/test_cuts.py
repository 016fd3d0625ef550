"""Which frames of a clip are taken: clips whose frames are numbered, against the rule worked out by hand."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from flowshard.data import clips as reader
from flowshard.data.clips import Cut, clip_facts
from flowshard.data.media import read_frames
from flowshard.errors import UserError

SIZE = 64
STEP = 8
"""Greys between one number of a digit and the next, far more than H.264 changes."""


def _picture(number: int) -> np.ndarray:
    """A picture that shows its number in base 16, as the grey of its halves."""
    high, low = divmod(number, 16)
    picture = np.empty((SIZE, SIZE, 3), dtype=np.uint8)
    picture[:, : SIZE // 2], picture[:, SIZE // 2 :] = 40 + STEP * high, 40 + STEP * low
    return picture


def _write(file: Path, times: Sequence[Fraction], *, key_every: int = 12) -> Path:
    """Frames 0, 1, 2, ... shown at these times, with B-frames and a key frame every so many."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "8", "bf": "2", "sc_threshold": "0"})
        stream.height = stream.width = SIZE
        stream.pix_fmt = "yuv420p"
        stream.gop_size = key_every
        stream.codec_context.time_base = stream.time_base = Fraction(1, 24000)
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(_picture(number % 256), format="rgb24")
            frame.pts, frame.time_base = int(time * 24000), Fraction(1, 24000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file


def _numbers(file: Path | Sequence[Path], frames: int, cut: Cut) -> list[int]:
    """Which pictures are read."""
    found = read_frames(file, height=SIZE, width=SIZE, frames=frames, where="row", cut=cut).astype(float)
    digits = [np.round((found[:, 8:-8, side].mean(axis=(1, 2, 3)) - 40) / STEP) for side in (_LEFT, _RIGHT)]
    return [int(high * 16 + low) for high, low in zip(*digits, strict=True)]


_LEFT, _RIGHT = slice(8, SIZE // 2 - 8), slice(SIZE // 2 + 8, SIZE - 8)


def _even_times(count: int, rate: int = 24) -> list[Fraction]:
    return [Fraction(number, rate) for number in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuts")


@pytest.fixture(scope="module", params=["mp4", "mkv"])
def clip(folder: Path, request: pytest.FixtureRequest) -> Path:
    """96 frames at 24 a second: 4 seconds, a key frame every half. Matroska rounds times to milliseconds."""
    return _write(folder / f"clip.{request.param}", _even_times(96))


@pytest.fixture(scope="module")
def varying(folder: Path) -> Path:
    """A frame each twelfth of a second for one second, one each half second for two, then each 24th for one."""
    times = [Fraction(n, 12) for n in range(12)] + [1 + Fraction(n, 2) for n in range(4)]
    return _write(folder / "varying.mp4", [*times, *(3 + Fraction(n, 24) for n in range(24))])


def test_frames_are_taken_as_stored_without_a_rate(clip: Path) -> None:
    assert _numbers(clip, 9, Cut()) == list(range(9))


@pytest.mark.parametrize(
    ("cut", "frames", "expected"),
    [
        (Cut(fps=24), 5, [0, 1, 2, 3, 4]),
        (Cut(fps=12), 5, [0, 2, 4, 6, 8]),
        (Cut(fps=48), 5, [0, 0, 1, 1, 2]),
        # k / 16 seconds are 1.5 k frames; the frame that has come by then.
        (Cut(fps=16), 7, [0, 1, 3, 4, 6, 7, 9]),
        (Cut(start=1.0), 3, [24, 25, 26]),
        (Cut(start=1.02), 3, [25, 26, 27]),
        (Cut(start=1.02, fps=24), 3, [24, 25, 26]),
        (Cut(start=2.5, fps=8), 3, [60, 63, 66]),
        (Cut(start=1.0, end=2.0, sampling="even"), 2, [24, 47]),
        (Cut(start=1.0, end=2.0, sampling="even"), 1, [35]),
        (Cut(sampling="even"), 5, [0, 24, 48, 71, 95]),
        (Cut(sampling="even", fps=8), 4, [0, 30, 63, 93]),
        (Cut(sampling="random", draw=0.0), 3, [0, 1, 2]),
        # 94 places for three frames.
        (Cut(sampling="random", draw=0.5), 3, [47, 48, 49]),
        (Cut(sampling="random", draw=1 - 1e-12), 3, [93, 94, 95]),
        (Cut(sampling="random", draw=0.999, start=1, end=2, fps=12), 11, list(range(26, 48, 2))),
        (Cut(sampling="random", draw=0.3, start=1, end=2, fps=12), 11, list(range(24, 46, 2))),
        (Cut(start=3.9, short="repeat"), 5, [94, 95, 95, 95, 95]),
        (Cut(start=3.75, short="trim", stride=4), 81, [90, 91, 92, 93, 94]),
        (Cut(start=3.75, short="trim", stride=4, sampling="even"), 81, [90, 91, 92, 94, 95]),
        (Cut(start=3.75, short="trim", stride=1), 81, [90, 91, 92, 93, 94, 95]),
        (Cut(start=3.9, short="trim", stride=4), 81, [94]),
    ],
    ids=str,
)
def test_frames_are_those_of_the_rule(clip: Path, cut: Cut, frames: int, expected: list[int]) -> None:
    assert _numbers(clip, frames, cut) == expected


@pytest.mark.parametrize(
    ("cut", "frames", "expected"),
    [
        # Shown at k / 4 seconds: of twelve a second every third, of two a second each twice, of 24 every sixth.
        (Cut(fps=4), 16, [0, 3, 6, 9, 12, 12, 13, 13, 14, 14, 15, 15, 16, 22, 28, 34]),
        (Cut(fps=4, start=1.25), 4, [12, 13, 13, 14]),
        (Cut(fps=2, sampling="even"), 4, [0, 12, 15, 28]),
        (Cut(), 3, [0, 1, 2]),
        (Cut(start=1.2), 3, [13, 14, 15]),
    ],
    ids=str,
)
def test_a_varying_rate_is_sampled_by_time(varying: Path, cut: Cut, frames: int, expected: list[int]) -> None:
    assert _numbers(varying, frames, cut) == expected


@pytest.mark.parametrize(
    ("cut", "frames", "message"),
    [
        (Cut(), 97, "has 96 frames, data.frames asks for 97"),
        (Cut(fps=16), 65, "has 64 frames at 16 a second, data.frames asks for 65"),
        (Cut(sampling="even"), 97, "has 96 frames, data.frames asks for 97"),
        (Cut(start=1, end=2), 25, "has 24 frames from start to end, data.frames asks for 25"),
        (Cut(start=4.5), 1, "has 0 frames from start to end"),
        (Cut(start=4.5, short="repeat"), 1, "has 0 frames from start to end"),
        (Cut(start=4.5, short="trim", fps=8, sampling="random"), 5, "has 0 frames at 8 a second from start to end"),
    ],
    ids=str,
)
def test_too_few_frames_are_refused_with_their_number(clip: Path, cut: Cut, frames: int, message: str) -> None:
    with pytest.raises(UserError, match=f"^row: {message}"):
        _numbers(clip, frames, cut)


def test_a_clip_exactly_as_long_as_asked_is_read_to_its_end(clip: Path) -> None:
    assert _numbers(clip, 96, Cut()) == list(range(96))
    assert _numbers(clip, 64, Cut(fps=16))[-1] == 94  # 63 / 16 seconds are 94.5 frames


@pytest.mark.parametrize(
    ("cut", "frames"),
    [
        (Cut(start=100.0), 5),
        (Cut(start=100.0, fps=12), 5),
        (Cut(sampling="random", draw=0.8), 5),
        (Cut(sampling="even"), 3),
        (Cut(), 5),
    ],
    ids=str,
)
def test_a_long_clip_is_not_decoded_for_a_few_frames(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cut: Cut, frames: int
) -> None:
    file = folder / "long.mp4"
    if not file.exists():
        _write(file, _even_times(3000), key_every=24)
    decoded: list[float] = []
    plain = reader.Clip._decoded

    def counted(self: reader.Clip) -> object:
        for seconds, frame in plain(self):
            decoded.append(seconds)
            yield seconds, frame

    monkeypatch.setattr(reader.Clip, "_decoded", counted)
    read_frames(file, height=SIZE, width=SIZE, frames=frames, where="row", cut=cut)
    # At most a second before each frame that is looked for, of 3000 frames.
    assert frames <= len(decoded) <= 24 * 3 + frames + 1


def _without_first_packet(whole: Path, file: Path) -> None:
    with av.open(str(whole)) as source, av.open(str(file), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in list(source.demux(video=0))[1:]:
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)


@pytest.mark.parametrize("sampling", ["prefix", "even", "random"])
def test_packets_that_give_no_picture_are_not_counted(folder: Path, sampling: str) -> None:
    # A clip cut out of a stream without its first key frame: nothing can be decoded until the next, frame 12.
    whole, file = _write(folder / "whole.mkv", _even_times(36)), folder / "torn.mkv"
    _without_first_packet(whole, file)
    assert clip_facts(file).frames > 24
    cut = Cut(sampling=sampling, draw=0.999)  # type: ignore[arg-type]
    expected = {"prefix": [12, 13, 14], "even": [12, 24, 35], "random": [33, 34, 35]}[sampling]
    assert _numbers(file, 3, cut) == expected
    assert _numbers(file, 24, cut) == list(range(12, 36))
    with pytest.raises(UserError, match=r"has 24 frames, data\.frames asks for 25"):
        _numbers(file, 25, cut)


def test_facts_of_a_clip_are_known_without_decoding_it(clip: Path) -> None:
    facts = clip_facts(clip)
    assert (facts.width, facts.height, facts.frames) == (SIZE, SIZE, 96)
    assert facts.fps == pytest.approx(24, rel=1e-3)


def test_pictures_in_a_row_are_a_clip(tmp_path: Path) -> None:
    files = []
    for number in range(12):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(_picture(number)).save(files[-1])
    assert _numbers(files, 5, Cut()) == [0, 1, 2, 3, 4]
    assert _numbers(files, 4, Cut(sampling="even")) == [0, 4, 7, 11]
    assert _numbers(files, 14, Cut(short="repeat")) == [*range(12), 11, 11]
    with pytest.raises(UserError, match=r"has 12 frames, data\.frames asks for 13"):
        _numbers(files, 13, Cut())
    files[3].write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"^row: .*3\.png cannot be decoded"):
        _numbers(files, 5, Cut())


@pytest.mark.parametrize(
    "cut",
    [
        Cut(fps=8.0),
        Cut(sampling="even"),
        Cut(sampling="random", draw=0.5),
        Cut(short="repeat"),
        Cut(start=1),
        Cut(end=1),
    ],
    ids=str,
)
def test_whatever_changes_the_frames_is_told_to_the_cache(cut: Cut) -> None:
    assert cut.key() != {}
    assert Cut().key() == {}
    assert Cut(sampling="random", draw=0.25).key() != Cut(sampling="random", draw=0.5).key()
    assert Cut(short="trim", stride=4).key() != Cut(short="repeat", stride=4).key()
    # What does not matter makes no other entry.
    assert Cut(draw=0.25, stride=4).key() == {}


@pytest.mark.parametrize("cut", [Cut(), Cut(fps=8), Cut(sampling="even"), Cut(sampling="random", fps=8)], ids=str)
def test_a_clip_of_which_nothing_can_be_decoded_has_no_frames(folder: Path, cut: Cut) -> None:
    file = folder / "none.mkv"
    _without_first_packet(_write(folder / "few.mkv", _even_times(12)), file)
    with pytest.raises(UserError, match=r"^row: has 0 frames"):
        _numbers(file, 1, cut)
