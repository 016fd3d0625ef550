"""`flowshard report`: one page of what a run, or several, left on the disk."""

import json
import math
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from flowshard.cli import main
from flowshard.data.media import write_video
from flowshard.report import style
from flowshard.report.charts import linear_axis, log_axis, short
from flowshard.report.series import smooth, thin
from tests.browser import Browser, find_browser

VOID = {"meta", "img", "br"}
EVIL = '"><script>alert(1)</script>'


class Page(HTMLParser):
    """What is in a page; refuses tags that do not close in order."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.charts: dict[str, dict[str, list[tuple[float, float]]]] = {}
        """Title of a chart to the label of a line to its points."""
        self.content = file.read_text(encoding="utf-8")
        self.feed(self.content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.elements.append((tag, given))
        if tag == "svg":
            self.charts[given["aria-label"]] = {}
        if "data-x" in given:
            xs, ys = ([float(one or "nan") for one in given[key].split(",")] for key in ("data-x", "data-y"))
            next(reversed(self.charts.values()))[given["data-label"]] = list(zip(xs, ys, strict=True))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data + "\n"

    def attributes(self, *names: str) -> list[str]:
        return [given[name] for _, given in self.elements for name in names if name in given]


def _line(step: int, **other: Any) -> dict[str, Any]:
    plain = {
        "step": step,
        "loss": 1.0 / step,
        "grad_norm": 0.25 * step,
        "learning_rate": 1e-4,
        "samples_per_second": 2.0,
        "tokens_per_second": 3080.0,
        "seconds": 2.0,
        "seconds_data": 0.125,
        "seconds_forward": 0.5,
        "seconds_backward": 1.25,
        "seconds_optimizer": 0.125,
        "memory_peak_bytes": 3 * 2**30,
    }
    return {**plain, **other}


def _run(folder: Path, lines: Iterable[dict[str, Any]], prompts: Sequence[Any] = (), **config: Any) -> Path:
    folder.mkdir(parents=True)
    tree = {
        "seed": 0,
        "train": {"steps": 40, "learning_rate": 1e-4},
        "validation": {"prompts": list(prompts)},
        **config,
    }
    record = {"steps": 40, "layout": {"strategy": "zero3", "world": 4}, "versions": {"torch": "2.13.0"}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**tree, "record": record}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _page(*arguments: str | Path) -> Page:
    assert main(["report", *map(str, arguments)]) == 0
    output = arguments[arguments.index("--output") + 1] if "--output" in arguments else None
    return Page(Path(output) if output else Path(arguments[0]) / "report.html")


def test_the_page_has_the_numbers_of_the_metrics_and_asks_for_no_other_file(tmp_path: Path) -> None:
    lines = [_line(step, mfu=0.375, loss_by_sigma=[1.5, None, 0.5, None]) for step in range(1, 31)]
    run = _run(tmp_path / "fox", lines)
    (run / "validation.jsonl").write_text(
        '{"step": 0, "loss": 0.75, "loss_by_sigma": null}\n{"step": 20, "loss": 0.5}\n'
    )
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    (run / "checkpoints" / "step-00000020" / "lora.safetensors").write_bytes(bytes(2048))
    page = _page(run)
    assert page.charts["Loss"]["loss, each step"] == [
        (float(step), pytest.approx(1 / step, rel=1e-4)) for step in range(1, 31)
    ]
    assert page.charts["Gradient norm"]["gradient norm, each step"][-1] == (30.0, 7.5)
    assert page.charts["Held-out loss"]["loss"] == [(0.0, 0.75), (20.0, 0.5)]
    assert page.charts["Time of a step"]["backward"] == [(float(step), 1.25) for step in range(1, 31)]
    assert page.charts["Model FLOPs utilisation"]["utilisation"][-1] == (30.0, 37.5)
    assert page.charts["Peak memory so far"]["memory"][-1] == (30.0, 3.0)
    assert set(page.charts["Loss by noise level"]) == {f"sigma {part}" for part in ("0 to 0.25", "0.25 to 0.5", "0.5 to 0.75", "0.75 to 1")}  # fmt: skip
    assert "Held-out loss by noise level" not in page.charts
    for text in ("30 of 40 steps", "20 s more at this speed", "3 GiB", "2 KiB", "zero3", "2.13.0", "learning_rate"):
        assert text in page.text, text
    assert page.attributes("src", "href", "xlink:href", "action") == []
    assert "http" not in page.content
    assert "@import" not in page.content and "url(" not in page.content


def test_text_from_files_is_text_in_the_page(tmp_path: Path) -> None:
    run = _run(tmp_path / "<b>run", [_line(1)], [EVIL, {"prompt": EVIL}], output=EVIL)
    for number in range(2):
        file = run / "samples" / "step-00000001" / f"0{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 32), (255, 0, 0)).save(file)
    page = _page(run, _run(tmp_path / EVIL.replace("/", "_"), [_line(1)]))
    assert page.text.count(EVIL) >= 3
    assert page.text.count("<b>run") >= 3
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "<b>run" not in page.content


def test_samples_are_inside_the_page(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [_line(1)], ["a fox", "a clip"])
    rng = np.random.default_rng(0)
    for step in range(0, 300, 2):
        folder = run / "samples" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        Image.new("RGB", (400, 200), (step % 256, 0, 0)).save(folder / "00.png")
    for step in (0, 298):
        write_video(run / "samples" / f"step-{step:08d}" / "01.mp4", np.zeros((5, 32, 32, 3), np.uint8), fps=16)
    (run / "samples" / "step-00000298" / "00.png").write_bytes(b"half a fi")
    page = _page(run)
    pictures = page.attributes("src")
    assert {source.partition(",")[0] for source in pictures} == {"data:image/jpeg;base64", "data:video/mp4;base64"}
    assert len(pictures) == 47 + 2  # of 150 steps; one picture is broken
    assert "298" in page.text and "00.png cannot be decoded" in page.text
    assert "Shown are 48 of 150 steps" in page.text

    noise = rng.integers(0, 255, (13, 192, 192, 3), np.uint8)
    write_video(run / "samples" / "step-00000000" / "01.mp4", noise, fps=16)
    assert {source.partition(";")[0] for source in _page(run).attributes("src")} == {"data:image/jpeg"}


def test_several_runs_are_in_the_same_charts_with_what_differs_between_them(tmp_path: Path) -> None:
    first = _run(tmp_path / "one" / "run", [_line(step) for step in range(1, 21)])
    second = _run(tmp_path / "two" / "run", [_line(step, loss=2.0, grad_norm=None) for step in range(1, 11)], seed=7)
    page = _page(first, second, "--output", tmp_path / "both.html")
    assert not (first / "report.html").exists()
    assert page.charts["Loss"]["two/run, each step"] == [(float(step), 2.0) for step in range(1, 11)]
    assert len(page.charts["Loss"]["one/run"]) == 20
    assert set(page.charts["Gradient norm"]) == {"one/run", "one/run, each step"}
    differences = page.text.partition("Differences")[2].partition("Config")[0].split()
    assert differences[:8] == ["option", "one/run", "two/run", "seed", "0", "7", "one/run", str(first)]


def test_a_run_without_a_step_and_one_of_the_first_versions_have_a_page(tmp_path: Path) -> None:
    empty = _page(_run(tmp_path / "empty", []))
    assert empty.charts == {} and "0 of 40 steps" in empty.text
    old = [{"step": step, "loss": 0.5, "seconds": 1.0} for step in (1, 2)]
    assert set(_page(_run(tmp_path / "old", old)).charts) == {"Loss"}


def test_what_is_no_number_breaks_the_line_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    lines = [_line(step) for step in range(1, 8)]
    lines[3] = _line(4, loss=math.nan, grad_norm=None)
    lines[5] = _line(6, loss=math.inf)
    run = _run(tmp_path / "run", lines)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 8, "lo')
    page = _page(run)
    values = page.charts["Loss"]["loss, each step"]
    assert [step for step, _ in values] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, value in values if math.isnan(value)] == [4, 6]
    route = next(given["d"] for _, given in page.elements if given.get("data-label") == "loss, each step")
    assert route.count("M") == 3
    assert "NaN" not in page.content.replace(style.STYLE, "").partition("<script>")[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "does not exist; give the folder that `flowshard train` wrote"),
        (lambda folder: folder, "is no run: it has no config.yaml; give the folder"),
        (lambda folder: _run(folder / "a", [{"loss": 1.0}]), "metrics.jsonl: line 1 is no JSON object with a step"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    assert main(["report", str(make(tmp_path))]) == 2
    assert message in capsys.readouterr().err


def test_a_long_run_is_thinned_to_its_extremes(tmp_path: Path) -> None:
    lines = [_line(step, loss=100.0 if step == 17_777 else 1.0 + step % 2) for step in range(1, 30_001)]
    run = _run(tmp_path / "run", lines)
    page = _page(run)
    assert (run / "report.html").stat().st_size < 600_000
    points = page.charts["Loss"]["loss, each step"]
    assert len(points) <= 1000
    assert (17_777.0, 100.0) in points
    assert {value for _, value in points} == {1.0, 2.0, 100.0}


def test_thinning_keeps_order_and_breaks() -> None:
    ys = np.sin(np.arange(5000) / 40.0)
    ys[2500] = math.nan
    xs, kept = thin(list(range(5000)), ys.tolist(), 300)
    assert len(xs) <= 300 and xs == sorted(xs)
    assert np.nanmax(kept) == np.nanmax(ys) and np.nanmin(kept) == np.nanmin(ys)
    assert [math.isnan(value) for value in kept].count(True) == 1
    assert thin([1, 2], [3.0, 4.0], 2) == ([1, 2], [3.0, 4.0])


def test_smoothing_is_the_weighted_mean_of_what_came_before() -> None:
    values = np.random.default_rng(1).normal(size=40)
    keep = 1 - 1 / 8
    expected = [np.average(values[: end + 1], weights=keep ** np.arange(end, -1, -1)) for end in range(len(values))]
    assert smooth(values.tolist(), 8) == pytest.approx(expected)
    broken = smooth([1.0, math.nan, 3.0], 1)
    assert broken[0] == 1.0 and math.isnan(broken[1]) and broken[2] == 3.0


def test_axes_have_round_ticks() -> None:
    assert linear_axis(0.13, 0.92).ticks == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert linear_axis(1, 20, whole=True, tight=True).ticks == (5.0, 10.0, 15.0, 20.0)
    assert linear_axis(3, 3).low < 3 < linear_axis(3, 3).high
    assert log_axis(0.02, 30).ticks == (0.01, 0.1, 1.0, 10.0, 100.0)
    assert [short(one) for one in (0, 1e-4, 2.93521, 6160.4, 1.25e7, -3e-5)] == [
        "0",
        "1e-4",
        "2.935",
        "6,160",
        "1.25e7",
        "-3e-5",
    ]


def _luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_colours_have_the_contrast_that_accessibility_asks_for(theme: dict[str, str]) -> None:
    def contrast(one: str, other: str) -> float:
        low, high = sorted((_luminance(theme[one]), _luminance(theme[other])))
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(f"c{index}", "panel") >= 3 for index in range(1, 9))
    assert all(contrast(text, ground) >= 4.5 for text in ("text", "muted") for ground in ("page", "panel"))


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="needs a Chromium; install one, or name it in CHROMIUM")
def test_a_browser_shows_the_page_in_any_width_and_theme(tmp_path: Path) -> None:
    prompts = ["a fox " * 60, "w" * 300]
    run = _run(tmp_path / ("long-name-" * 12), [_line(step) for step in range(1, 31)], prompts, output="x" * 300)
    for step in range(0, 30, 2):
        folder = run / "samples" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (640, 320), (8 * step, 0, 0)).save(folder / f"0{number}.png")
    other = _run(tmp_path / "other", [_line(step, loss=2.0) for step in range(1, 31)])
    program = find_browser()
    assert program is not None
    with Browser(program, tmp_path / "profile") as browser:
        for runs in ([run], [run, other]):
            _page(*runs, "--output", tmp_path / "page.html")
            backgrounds = set()
            for width in (320, 360, 768, 1280, 1920):
                for dark in (False, True):
                    browser.open(tmp_path / "page.html", width=width, height=800, dark=dark)
                    browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
                    assert browser.evaluate("document.documentElement.scrollWidth") <= width
                    backgrounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert len(backgrounds) == 2
            # The pointer in the middle of the first chart: the values of its lines at that step.
            browser.evaluate("document.querySelector('figure.chart svg').scrollIntoView()")
            place = browser.evaluate(
                "(({left, top, width, height}) => [left + width / 2, top + height / 2])"
                "(document.querySelector('figure.chart svg').getBoundingClientRect())"
            )
            browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
            shown = browser.evaluate("document.querySelector('.values').innerText").splitlines()
            step = int(shown[0].removeprefix("step "))
            assert 14 <= step <= 17
            assert any(text.endswith(f" {1 / step:.5g}") for text in shown if "each step" in text), shown
            assert browser.complaints == [] and browser.requests == []
