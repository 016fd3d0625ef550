"""Metadata files: exact prompts from every format, and messages that name file, row and line."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowshard.data.metadata import Metadata, read_metadata
from flowshard.data.problems import DataError
from flowshard.data.records import natural_order
from flowshard.errors import UserError

FORMATS = ["csv", "json", "jsonl"]
PROMPTS = {
    "comma": "a rabbit, grey, large",
    "quotes": 'a "grey" rabbit',
    "doubled-quotes": 'a ""grey"" rabbit"',
    "newline": "a rabbit\nand its burrow\n",
    "carriage-return": "a rabbit\r\nand its burrow",
    "tab": "a\trabbit",
    "formula": "=1+1",
    "path": "../media/a.mp4",
    "long": "a rabbit, " * 2000,
    "above-the-csv-default-limit": "x" * 200_000,
    "spaces": "  a rabbit  ",
    "number": "007",
    "other-scripts": "一只兔子 🐇 lièvre e\u0301",
    "line-separator": "a\u2028rabbit\u0085x\x0b",
    "backslash": "a\\nrabbit\\",
    "empty": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with two clips and a picture; only their names matter here."""
    for name in ("a.mp4", "b.mp4", "c.png"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def _text(suffix: str, records: Sequence[dict[str, Any]]) -> str:
    """The records as the standard library writes them."""
    if suffix == "json":
        return json.dumps(records)
    if suffix == "jsonl":
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(key for record in records for key in record)))
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def _read(folder: Path, name: str, content: str | bytes, root: str | Path | None = None) -> Metadata:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return read_metadata(folder / name, root)


def _refusal(folder: Path, name: str, content: str | bytes, root: str | Path | None = None) -> str:
    with pytest.raises(UserError) as raised:
        _read(folder, name, content, root)
    return str(raised.value)


def _samples(metadata: Metadata) -> list[tuple[int, str, str]]:
    return [(row.number, row.media.name, row.prompt) for row in metadata.rows]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_prompt_survives_every_format(folder: Path, suffix: str, prompt: str) -> None:
    records = [{"video": "a.mp4", "prompt": prompt}, {"video": "b.mp4", "prompt": "another"}]
    metadata = _read(folder, f"m.{suffix}", _text(suffix, records))
    assert _samples(metadata) == [(1, "a.mp4", prompt), (2, "b.mp4", "another")]


@pytest.mark.parametrize("suffix", FORMATS)
def test_formats_give_equal_samples(folder: Path, suffix: str) -> None:
    records = [
        {"video": "a.mp4", "image": "", "prompt": "first", "note": "x"},
        {"video": "", "image": "c.png", "prompt": "second", "note": "y"},
        {"video": "a.mp4", "image": "", "prompt": "the same clip again", "note": ""},
    ]
    metadata = _read(folder, f"m.{suffix.upper()}", _text(suffix, records))
    assert _samples(metadata) == [(1, "a.mp4", "first"), (2, "c.png", "second"), (3, "a.mp4", "the same clip again")]
    assert metadata.notes == (f"{metadata.label}: unused columns: note",)
    assert metadata.rows[0].media == folder / "a.mp4"


@pytest.mark.parametrize(
    "content",
    [
        "video,prompt\r\na.mp4,x\r\nb.mp4,y\r\n",
        "video,prompt\na.mp4,x\nb.mp4,y",
        "\ufeffvideo,prompt\na.mp4,x\nb.mp4,y\n",
        "video,prompt\n\na.mp4,x\n\n\nb.mp4,y\n\n",
        '"video","prompt"\n"a.mp4","x"\n"b.mp4","y"\n',
        "prompt,video\nx,a.mp4\ny,b.mp4\n",
        "\nvideo,prompt\na.mp4,x\nb.mp4,y\n",
    ],
    ids=["crlf", "no-last-newline", "byte-order-mark", "blank-lines", "all-quoted", "other-order", "blank-first-line"],
)
def test_csv_is_read_however_it_was_written(folder: Path, content: str) -> None:
    assert _samples(_read(folder, "m.csv", content)) == [(1, "a.mp4", "x"), (2, "b.mp4", "y")]


@pytest.mark.parametrize("suffix", FORMATS)
def test_byte_order_mark_is_no_part_of_the_text(folder: Path, suffix: str) -> None:
    metadata = _read(folder, f"m.{suffix}", "\ufeff" + _text(suffix, [{"video": "a.mp4", "prompt": "x"}]))
    assert _samples(metadata) == [(1, "a.mp4", "x")]


@pytest.mark.parametrize("blank", ["\n\n", "\r\n", "  \t\n"])
def test_blank_lines_of_jsonl_are_skipped(folder: Path, blank: str) -> None:
    lines = [json.dumps({"video": name, "prompt": name[0]}) + "\n" for name in ("a.mp4", "b.mp4")]
    metadata = _read(folder, "m.jsonl", blank + lines[0] + blank + lines[1] + blank)
    assert _samples(metadata) == [(1, "a.mp4", "a"), (2, "b.mp4", "b")]


def test_absent_and_null_media_columns_of_json_count_as_empty(folder: Path) -> None:
    records = [{"video": "a.mp4", "image": None, "prompt": "x"}, {"image": "c.png", "prompt": "y"}]
    assert _samples(_read(folder, "m.json", json.dumps(records))) == [(1, "a.mp4", "x"), (2, "c.png", "y")]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        # 0x92 is the apostrophe of Windows-1252. Counted by hand, from 1, in bytes.
        (b"video,prompt\na.mp4,a rabbit\x92s ear\n", "line 2, byte 15 (0x92)"),
        (b"\x92video,prompt\na.mp4,x\n", "line 1, byte 1 (0x92)"),
        (b"video,prompt\r\na.mp4,x\r\nb.mp4,\xe9\r\n", "line 3, byte 7 (0xe9)"),
        # The umlaut before it takes two bytes.
        ("video,prompt\na.mp4,ü".encode() + b"\xff\n", "line 2, byte 9 (0xff)"),
        # A character that the end of the file cuts off.
        (b"video,prompt\na.mp4,\xc3", "line 2, byte 7 (0xc3)"),
        ("video,prompt\na.mp4,兔\n".encode("gbk"), "line 2, byte 7 (0xcd)"),
    ],
)
def test_other_encodings_are_refused_with_line_and_byte(folder: Path, content: bytes, place: str) -> None:
    assert _refusal(folder, "m.csv", content) == f"{folder / 'm.csv'}: {place} is not UTF-8; save the file as UTF-8"


@pytest.mark.parametrize("suffix", FORMATS)
def test_locale_does_not_matter(folder: Path, suffix: str) -> None:
    prompt = "一只兔子 ü 🐇"
    text = _text(suffix, [{"video": "a.mp4", "prompt": prompt}])
    (folder / f"m.{suffix}").write_bytes(text.encode())
    code = "import sys; from flowshard.data.metadata import read_metadata as r; print(ascii(r(sys.argv[1]).rows[0].prompt))"
    # Without these two, Python itself turns a C locale into UTF-8.
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(folder / f"m.{suffix}")]
    done = subprocess.run(command, env={**os.environ, **plain}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ascii(prompt)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("video,words\na.mp4,x\n", "the column 'prompt' is missing; found 'video', 'words'"),
        ("clip,prompt\na.mp4,x\n", "a column 'video' or 'image' is missing; found 'clip', 'prompt'"),
        ("video,caption,text\na.mp4,x,y\n", "the columns 'text' and 'caption' both mean 'prompt'; remove one"),
        ("video,file_name,prompt\na.mp4,a.mp4,x\n", "row 1: names several media"),
        ("video;prompt\na.mp4;x\n", "the column 'prompt' is missing; found 'video;prompt'"),
        ("video,prompt,video\na.mp4,x,b.mp4\n", "the column 'video' is there twice"),
        ("video,prompt\n", "holds no samples"),
        ("video,prompt", "holds no samples"),
        ("", "holds no samples"),
        ("\ufeff", "holds no samples"),
        ("\n\n", "holds no samples"),
        ("video,prompt\na.mp4,x\nb.mp4,y,z\n", "row 2 (line 3) has 3 cells, the header has 2"),
        ("video,prompt\na.mp4,x\n\nb.mp4\n", "row 2 (line 4) has 1 cells, the header has 2"),
        ('video,prompt\na.mp4,"x\ny"\nb.mp4,y,z\n', "row 2 (line 4) has 3 cells, the header has 2"),
    ],
)
def test_csv_that_does_not_fit_is_refused_with_the_place(folder: Path, content: str, message: str) -> None:
    assert _refusal(folder, "m.csv", content).startswith(f"{folder / 'm.csv'}: {message}")


@pytest.mark.parametrize(
    "content",
    [
        'video,prompt\na.mp4,x\nb.mp4,"y\na.mp4,x\na.mp4,x\n',
        'video,prompt\na.mp4,x\nb.mp4,"y" z\na.mp4,x\n',
        'video,prompt\na.mp4,x\nb.mp4,"y\na.mp4,"x"\na.mp4,x\n',
    ],
    ids=["never-closed", "text-behind-it", "closed-in-the-next-row"],
)
def test_unbalanced_quote_is_refused_at_the_row_that_opens_it(folder: Path, content: str) -> None:
    message = _refusal(folder, "m.csv", content)
    assert message.startswith(f"{folder / 'm.csv'}: ")
    assert "check the quotes" in message
    assert re.search(r"row 2\b", message)
    assert re.search(r"line 3\b", message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.json", "", "line 1, column 1: "),
        ("m.json", '[\n  {"video": "a.mp4" "prompt": "x"}\n]', "line 2, column 21: "),
        ("m.json", "[]", "holds no samples"),
        ("m.json", '{"video": "a.mp4", "prompt": "x"}', "a .json metadata file is a list of objects"),
        ("m.json", '[{"video": "a.mp4", "prompt": "x"}, "b.mp4"]', "row 2 is not an object"),
        ("m.json", '[{"video": "a.mp4"}]', "the column 'prompt' is missing; found 'video'"),
        ("m.json", '[{"video": "a.mp4", "prompt": "x"}, {"video": "b.mp4"}]', "row 2: has no 'prompt'"),
        ("m.json", '[{"video": "a.mp4", "prompt": null}]', "row 1: has no 'prompt'"),
        ("m.json", '[{"video": "a.mp4", "prompt": 3}]', "row 1: 'prompt' must be text or a list of texts, not 3"),
        ("m.json", '[{"video": "a.mp4", "prompt": []}]', "row 1: 'prompt' must be text or a list of texts, not []"),
        ("m.json", '[{"video": "a.mp4", "prompt": ["x", 3]}]', "row 1: 'prompt' must be text or a list of texts"),
        ("m.json", '[{"video": 1, "prompt": "x"}]', "row 1: 'video' must be text, not 1"),
        ("m.jsonl", "", "holds no samples"),
        ("m.jsonl", "\n\n", "holds no samples"),
        ("m.jsonl", '{"video": "a.mp4", "prompt": "x"}\n\n{"video": "b.mp4", \n', "line 3, column "),
        ("m.jsonl", '{"video": "a.mp4", "prompt": "x"}\n{"video": "a.mp4"} {}\n', "line 2, column 20: "),
        ("m.jsonl", '{"video": "a.mp4", "prompt": "x"}\n\n5\n', "line 3 is not an object"),
        ("m.jsonl", '{"video": "a.mp4", "prompt": 3}\n', "row 1: 'prompt' must be text or a list of texts, not 3"),
    ],
)
def test_json_that_does_not_fit_is_refused_with_the_place(folder: Path, name: str, content: str, message: str) -> None:
    assert _refusal(folder, name, content).startswith(f"{folder / name}: {message}")


@pytest.mark.parametrize("name", ["m.json", "m.jsonl"])
def test_key_given_twice_in_an_object_is_refused_like_a_column(folder: Path, name: str) -> None:
    record = '{"video": "a.mp4", "prompt": "x", "prompt": "y"}'
    message = _refusal(folder, name, f"[{record}]" if name == "m.json" else record)
    assert message.startswith(f"{folder / name}: ")
    assert "'prompt'" in message
    assert "twice" in message


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("video", "image", "message"),
    [
        ("b.mp4", "c.png", "row 2: names both a video and an image"),
        ("", "", "row 2: names no 'video' or 'image'"),
    ],
)
def test_row_without_exactly_one_medium_is_refused(
    folder: Path, suffix: str, video: str, image: str, message: str
) -> None:
    records = [{"video": "a.mp4", "image": "", "prompt": "x"}, {"video": video, "image": image, "prompt": "y"}]
    assert message in _refusal(folder, f"m.{suffix}", _text(suffix, records))


def test_missing_media_are_listed_with_rows_and_full_paths(folder: Path) -> None:
    message = _refusal(folder, "m.csv", "video,prompt\na.mp4,x\nno.mp4,y\nb.mp4,z\nsub/no.mp4,w\n")
    head, *rows = message.splitlines()
    assert head.startswith(f"{folder / 'm.csv'}: media of 2 of 4 rows do not exist")
    assert str(folder) in head.partition(";")[2]
    assert rows == [f"  row 2: {folder / 'no.mp4'}", f"  row 4: {folder / 'sub' / 'no.mp4'}"]


@pytest.mark.parametrize(("count", "shown", "more"), [(5, 5, None), (6, 5, "  and 1 more"), (40, 5, "  and 35 more")])
def test_many_missing_media_are_counted_not_listed(folder: Path, count: int, shown: int, more: str | None) -> None:
    rows = "".join(f"no{number}.mp4,x\n" for number in range(count))
    lines = _refusal(folder, "m.csv", f"video,prompt\n{rows}").splitlines()
    assert f"media of {count} of {count} rows" in lines[0]
    assert [line.split(":")[0] for line in lines[1 : shown + 1]] == [f"  row {n + 1}" for n in range(shown)]
    assert lines[shown + 1 :] == ([more] if more else [])


def _make_folder(path: Path) -> None:
    path.mkdir()


def _make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere.mp4")


@pytest.mark.parametrize("make", [_make_folder, _make_dangling_link])
def test_folder_or_dangling_link_named_like_a_clip_counts_as_missing(folder: Path, make: Any) -> None:
    make(folder / "x.mp4")
    message = _refusal(folder, "m.csv", "video,prompt\na.mp4,x\nx.mp4,y\n")
    assert message.splitlines()[1:] == [f"  row 2: {folder / 'x.mp4'}"]


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a rabbit climbs out of its burrow " * 20])
def test_name_that_no_file_system_can_hold_counts_as_missing(folder: Path, name: str) -> None:
    # What swapped columns lead to: a prompt in place of a name.
    assert "media of 1 of 1 rows do not exist" in _refusal(folder, "m.csv", f"video,prompt\n{name},a.mp4\n")


@pytest.mark.parametrize("name", ["../x.mp4", "sub/../../x.mp4", "{outside}", "..", "sub/../../other-set/x.mp4"])
def test_path_outside_the_root_is_refused_though_the_file_exists(folder: Path, tmp_path: Path, name: str) -> None:
    root = folder / "set"
    (root / "sub").mkdir(parents=True)
    (folder / "x.mp4").write_bytes(b"x")
    # A folder whose name merely starts like the root's is outside as well.
    (folder / "set-b").mkdir()
    (folder / "set-b" / "x.mp4").write_bytes(b"x")
    name = name.format(outside=folder / "set-b" / "x.mp4")
    message = _refusal(root, "m.csv", f"video,prompt\n{name},x\n")
    assert f"row 1: {name!r} lies outside the data folder {root}" in message


@pytest.mark.parametrize("name", ["{root}/a.mp4", "./a.mp4", "sub/../a.mp4", "sub//x.mp4"])
def test_other_spellings_of_a_path_inside_the_root_are_accepted(folder: Path, name: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "x.mp4").write_bytes(b"x")
    metadata = _read(folder, "m.csv", f"video,prompt\n{name.format(root=folder)},x\n")
    assert metadata.rows[0].media in {folder / "a.mp4", folder / "sub" / "x.mp4"}


@pytest.mark.parametrize("root", [".", "./", "media/..", ""])
def test_relative_root_starts_from_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    (folder / "media").mkdir()
    (folder / "lists").mkdir()
    monkeypatch.chdir(folder)
    metadata = _read(Path("lists"), "m.csv", "video,prompt\na.mp4,x\n", root=root)
    assert metadata.rows[0].media == folder / "a.mp4"


def test_root_other_than_the_metadata_folder_is_used_with_and_without_a_slash(folder: Path) -> None:
    (folder / "media").mkdir()
    (folder / "media" / "x.mp4").write_bytes(b"x")
    for root in (folder / "media", f"{folder}/media/"):
        assert _read(folder, "m.csv", "video,prompt\nx.mp4,x\n", root=root).rows[0].media == folder / "media" / "x.mp4"


def test_link_inside_the_root_may_lead_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("disk")
    (elsewhere / "big.mp4").write_bytes(b"x")
    (folder / "link.mp4").symlink_to(elsewhere / "big.mp4")
    (folder / "disk").symlink_to(elsewhere)
    metadata = _read(folder, "m.csv", "video,prompt\nlink.mp4,x\ndisk/big.mp4,y\n")
    assert [row.media for row in metadata.rows] == [folder / "link.mp4", folder / "disk" / "big.mp4"]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "name",
    ["兔子.mp4", "🐇.mp4", "a b  c.mp4", "a#b.mp4", "a%20b.mp4", "e\u0301.mp4", "x" * 236 + ".mp4", "a,b.mp4", "'.mp4"],
)
def test_awkward_file_names_are_found(folder: Path, suffix: str, name: str) -> None:
    (folder / name).write_bytes(b"x")
    metadata = _read(folder, f"m.{suffix}", _text(suffix, [{"video": name, "prompt": "x"}]))
    assert metadata.rows[0].media == folder / name


def test_names_are_taken_as_they_stand(folder: Path) -> None:
    (folder / "a b.mp4").write_bytes(b"x")
    message = _refusal(folder, "m.csv", "video,prompt\na%20b.mp4,x\n")
    assert message.endswith(f"row 1: {folder / 'a%20b.mp4'}")


def test_row_is_described_by_file_number_and_medium(folder: Path) -> None:
    metadata = _read(folder, "m.csv", "video,prompt\na.mp4,x\nb.mp4,y\n")
    assert metadata.describe(metadata.rows[1]) == f"{folder / 'm.csv'}, row 2 ({folder / 'b.mp4'})"


def test_metadata_that_cannot_be_opened_is_refused_by_option(folder: Path) -> None:
    (folder / "folder.csv").mkdir()
    for path, reason in (
        ("no.csv", "does not exist"),
        ("folder.csv", "holds no clip or picture"),
        ("a.mp4", "must end in .csv"),
    ):
        with pytest.raises(UserError, match=rf"^data\.metadata: .*{re.escape(path)} {reason}"):
            read_metadata(folder / path)
    with pytest.raises(UserError, match=r"^data\.root: the folder .*nowhere does not exist"):
        _read(folder, "m.csv", "video,prompt\na.mp4,x\n", root=folder / "nowhere")


def _folder_of_media(folder: Path, captions: dict[str, str | bytes | None]) -> Path:
    """A folder of media, each with the content of its caption file, if it has one."""
    place = folder / "media"
    for name, caption in captions.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
        if caption is not None:
            file.with_suffix(".txt").write_bytes(caption if isinstance(caption, bytes) else caption.encode())
    return place


def test_folder_of_media_is_read_with_the_captions_beside_them_in_natural_order(folder: Path) -> None:
    captions: dict[str, str | bytes | None] = {
        "clip10.mp4": "ten\n",
        "clip2.mp4": "\ufefftwo, 兔\r\n",
        "Clip1.MOV": " one\nand a line ",
        "sub/a.png": "",
        ".hidden.mp4": None,
        "notes.md": None,
        "readme.pdf": None,
    }
    place = _folder_of_media(folder, captions)
    metadata = read_metadata(place)
    samples = [(row.number, str(row.media.relative_to(place)), row.prompt) for row in metadata.rows]
    expected = ["Clip1.MOV", "clip2.mp4", "clip10.mp4", "sub/a.png"]
    assert samples == [
        (number, name, text)
        for number, (name, text) in enumerate(
            zip(expected, ["one\nand a line", "two, 兔", "ten", ""], strict=True), start=1
        )
    ]
    # A stray text is no caption of anything.
    (place / "license.txt").write_text("x")
    assert read_metadata(place).notes == (f"{place}: 3 files that are neither media nor captions are ignored",)


def test_folder_without_captions_or_media_is_refused_with_the_files(folder: Path) -> None:
    place = _folder_of_media(folder, {f"{number}.mp4": "x" if number < 2 else None for number in range(9)})
    with pytest.raises(UserError) as error:
        read_metadata(place)
    head, *files = str(error.value).splitlines()
    assert head == f"{place}: 7 media have no caption file beside them; add a .txt for each"
    assert files == [*(f"  {place / f'{number}.mp4'}" for number in range(2, 7)), "  and 2 more"]
    (place / "metadata.csv").write_text("video,prompt\n0.mp4,x\n")
    with pytest.raises(UserError, match=re.escape(f"set data.metadata={place / 'metadata.csv'}")):
        read_metadata(place)
    shared = _folder_of_media(folder / "shared", {"a.png": "x", "a.mp4": "x"})
    with pytest.raises(UserError, match=r"2 media share a \.txt with another medium"):
        read_metadata(shared)
    bad = _folder_of_media(folder / "bad", {"a.png": b"a rabbit\x92s ear"})
    with pytest.raises(UserError, match=re.escape(f"{bad / 'a.txt'}: line 1, byte 9 (0x92) is not UTF-8")):
        read_metadata(bad)
    with pytest.raises(UserError, match=r"data\.root: .* set data\.root=null"):
        read_metadata(place, folder)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("columns", "notes"),
    [
        (("video_path", "caption"), ("'video_path' is read as 'video'", "'caption' is read as 'prompt'")),
        (("file_name", "text"), ("'file_name' is read as 'media'", "'text' is read as 'prompt'")),
        (("file_path", "text"), ("'file_path' is read as 'media'", "'text' is read as 'prompt'")),
        (("image_path", "prompt"), ("'image_path' is read as 'image'",)),
        (("media", "prompt"), ()),
    ],
)
def test_columns_of_other_trainers_are_read_and_said(
    folder: Path, suffix: str, columns: tuple[str, str], notes: tuple[str, ...]
) -> None:
    records = [dict(zip(columns, values, strict=True)) for values in (("a.mp4", "x"), ("c.png", "y"))]
    metadata = _read(folder, f"m.{suffix}", _text(suffix, records))
    assert _samples(metadata) == [(1, "a.mp4", "x"), (2, "c.png", "y")]
    assert metadata.notes == tuple(f"{folder / f'm.{suffix}'}: column {note}" for note in notes)


def test_several_captions_of_a_row_are_kept_in_json_and_jsonl_only(folder: Path) -> None:
    records: list[dict[str, Any]] = [
        {"video": "a.mp4", "prompt": ["x", "", "y"]},
        {"video": "b.mp4", "prompt": '["x", "y"]'},
    ]
    for suffix in ("json", "jsonl"):
        rows = _read(folder, f"m.{suffix}", _text(suffix, records)).rows
        assert [row.prompts for row in rows] == [("x", "", "y"), ('["x", "y"]',)]
    rows = _read(folder, "m.csv", 'video,prompt\na.mp4,"[""x"", ""y""]"\n').rows
    assert rows[0].prompts == ('["x", "y"]',)


def test_prefix_begins_every_caption(folder: Path) -> None:
    (folder / "m.json").write_text(json.dumps([{"video": "a.mp4", "prompt": ["x", ""]}]))
    assert read_metadata(folder / "m.json", prefix="sks, ").rows[0].prompts == ("sks, x", "sks, ")


@pytest.mark.parametrize("suffix", FORMATS)
def test_start_and_end_are_seconds(folder: Path, suffix: str) -> None:
    cells = [(1.5, 3), ("", 2.25), (None, None), ("0", "")]
    records = [{"video": "a.mp4", "prompt": "x", "start": start, "end": end} for start, end in cells]
    rows = _read(folder, f"m.{suffix}", _text(suffix, records)).rows
    assert [(row.start, row.end) for row in rows] == [(1.5, 3.0), (0.0, 2.25), (0.0, None), (0.0, None)]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"start": "soon"}, "'start' must be seconds from 0 upwards, not 'soon'"),
        ({"start": -1}, "'start' must be seconds from 0 upwards, not -1"),
        ({"end": "nan"}, "'end' must be seconds from 0 upwards, not 'nan'"),
        ({"end": True}, "'end' must be seconds from 0 upwards, not True"),
        ({"start": 2, "end": 2}, "'end' (2) must come after 'start' (2)"),
        ({"end": 0}, "'end' (0) must come after 'start' (0)"),
        ({"video": "", "image": "c.png", "start": 1}, "'start' and 'end' are for clips"),
    ],
)
def test_times_that_make_no_sense_are_refused(folder: Path, cells: dict[str, Any], message: str) -> None:
    records = [{"video": "a.mp4", "prompt": "x"}, {"video": "a.mp4", "prompt": "x", **cells}]
    assert _refusal(folder, "m.json", json.dumps(records)).startswith(f"{folder / 'm.json'}: row 2: {message}")


@pytest.mark.parametrize("cell", ["frames", "frames/", "frames/*.png", "fra[m]es/frame_?*.png"])
def test_folder_and_pattern_are_a_clip_of_their_pictures_in_natural_order(folder: Path, cell: str) -> None:
    names = ["frame_1.png", "frame_2.png", "frame_10.png"]
    (folder / "frames").mkdir()
    for name in [*names, "notes.txt", ".frame_3.png"]:
        (folder / "frames" / name).write_bytes(b"x")
    row = _read(folder, "m.csv", f"video,prompt\n{cell},x\n").rows[0]
    assert [file.name for file in row.pictures] == names
    assert row.files == row.medium == row.pictures
    assert not row.is_picture


def test_name_with_brackets_is_a_file_before_it_is_a_pattern(folder: Path) -> None:
    (folder / "[ab].png").write_bytes(b"x")
    (folder / "a.png").write_bytes(b"x")
    row = _read(folder, "m.csv", "image,prompt\n[ab].png,x\n").rows[0]
    assert (row.media, row.pictures, row.is_picture) == (folder / "[ab].png", (), True)
    assert "media of 1 of 1 rows do not exist" in _refusal(folder, "m.csv", "image,prompt\nz*.png,x\n")


def test_all_problems_are_told_when_asked_and_the_other_rows_are_kept(folder: Path) -> None:
    lines = [
        '{"video": "a.mp4", "prompt": "x"}',
        '{"video": "no.mp4", "prompt": "x"}',
        '{"video": "a.mp4", ',
        "5",
        '{"video": "a.mp4"}',
        '{"video": "../a.mp4", "prompt": "x"}',
        '{"video": "b.mp4", "prompt": "y"}',
    ]
    (folder / "m.jsonl").write_text("\n".join(lines))
    found: list[DataError] = []
    metadata = read_metadata(folder / "m.jsonl", note=found.append)
    assert _samples(metadata) == [(1, "a.mp4", "x"), (7, "b.mp4", "y")]
    assert sorted((error.row or 0, error.kind) for error in found) == [
        (2, "missing file"),
        (3, "row"),
        (4, "row"),
        (5, "row"),
        (6, "path"),
    ]


def test_natural_order_takes_any_names() -> None:
    names = ["a", "a1b", "a1b2c", "a02", "a2", "a10", "A3", "²", "1", "x兔"]
    found = sorted((Path(name) for name in reversed(names)), key=natural_order)
    # Numbers first, then letters by their code.
    assert [path.name for path in found] == ["1", "a", "a1b", "a1b2c", "a02", "a2", "A3", "a10", "x兔", "²"]
