"""Model folders and safetensors files as they are looked at before anything loads."""

import json
import os
import shutil
import struct
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flowshard.errors import UserError
from flowshard.families import get_family
from flowshard.weights.files import (
    atomic_file,
    check_pipeline,
    download,
    find_pipeline,
    fingerprint,
    read_header,
    read_headers,
    read_json,
    scheduler_settings,
)

MIB = 2**20


@pytest.fixture
def pipeline(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pipeline that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "pipeline"))


def _seen_by_safetensors(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(file, framework="pt") as reader:
        slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 - it is no mapping
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def test_header_of_a_model_equals_what_safetensors_reads(tiny: Path) -> None:
    file = tiny / "transformer" / "diffusion_pytorch_model.safetensors"
    found = read_header(file)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == _seen_by_safetensors(file)
    assert {info.file for info in found.values()} == {file}


def test_header_of_every_type_and_shape_equals_what_safetensors_reads(tmp_path: Path) -> None:
    types = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
    tensors = {f"layer.{index}.größe": torch.zeros(index, 3).to(dtype) for index, dtype in enumerate(types, start=1)}
    tensors["scalar"] = torch.tensor(1.0)
    tensors["empty"] = torch.zeros(0, 4)
    file = tmp_path / "x.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    assert {name: (info.dtype, info.shape) for name, info in read_header(file).items()} == _seen_by_safetensors(file)


def test_file_without_tensors_has_an_empty_header(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors", metadata={"a": "b"})
    assert read_header(tmp_path / "x.safetensors") == {}


@pytest.mark.parametrize("kept", [0, 4, 8, 20, -1])
def test_cut_off_file_is_refused_by_name(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(8, 8)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError) as raised:
        read_header(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert str(raised.value).endswith("copy or download it again")


def test_file_with_bytes_behind_its_tensors_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(8, 8)}, file)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"xx")
    with pytest.raises(UserError, match=f"has {size + 2} bytes where its header announces {size}"):
        read_header(file)


def _pickle(file: Path) -> None:
    torch.save({"weight": torch.ones(8, 8)}, file)


def _page_of_an_error(file: Path) -> None:
    file.write_text("<!DOCTYPE html><html><body>404</body></html>" * 20)


def _large_file_pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


def _header(text: str | bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        raw = text.encode() if isinstance(text, str) else text
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))

    return write


@pytest.mark.parametrize(
    "write",
    [
        _pickle,
        _page_of_an_error,
        _large_file_pointer,
        _header("{broken"),
        _header(b"\xff\xfe"),
        _header("[]"),
        _header("null"),
        _header('{"weight": 5}'),
        _header('{"weight": {"dtype": "F32", "shape": [1]}}'),
        _header('{"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}'),
        _header('{"weight": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}'),
        _header('{"weight": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}'),
    ],
    ids=[
        "pickle", "html", "lfs-pointer", "broken-json", "not-utf8", "list", "null", "number", "no-offsets", "one-offset",
        "shape-is-a-number", "offsets-are-text",
    ],
)  # fmt: skip
def test_file_that_is_not_safetensors_is_refused_by_name(tmp_path: Path, write: Callable[[Path], None]) -> None:
    file = tmp_path / "x.safetensors"
    write(file)
    with pytest.raises(UserError) as raised:
        read_header(file)
    assert str(raised.value).startswith(f"{file}: is not a safetensors file")


def test_file_that_is_missing_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    for file in (tmp_path / "no.safetensors", tmp_path):
        with pytest.raises(UserError, match=f"^{file}: cannot be read"):
            read_header(file)


def _shard(folder: Path, index: object = None) -> dict[str, torch.Tensor]:
    """Two shards as diffusers names them, and their index."""
    tensors = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2), "b.weight": torch.ones(4, 5)}
    first, second = (f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2))
    folder.mkdir(exist_ok=True)
    save_file({name: tensors[name] for name in ("a.weight", "a.bias")}, folder / first)
    save_file({"b.weight": tensors["b.weight"]}, folder / second)
    if index is None:
        index = {"metadata": {}, "weight_map": {"a.weight": first, "a.bias": first, "b.weight": second}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_sharded_folder_gives_all_tensors_with_their_shards(tmp_path: Path) -> None:
    tensors = _shard(tmp_path / "transformer")
    found = read_headers(tmp_path / "transformer")
    assert {name: info.shape for name, info in found.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert [found[name].file.name[24:29] for name in ("a.weight", "a.bias", "b.weight")] == ["00001", "00001", "00002"]


def test_file_beside_the_shards_that_the_index_does_not_name_is_left_out(tmp_path: Path) -> None:
    tensors = _shard(tmp_path)
    save_file({"old.weight": torch.ones(1)}, tmp_path / "old.safetensors")
    assert read_headers(tmp_path).keys() == tensors.keys()


def test_missing_shard_is_named(tmp_path: Path) -> None:
    _shard(tmp_path)
    missing = "diffusion_pytorch_model-00002-of-00002.safetensors"
    (tmp_path / missing).unlink()
    with pytest.raises(UserError) as raised:
        read_headers(tmp_path)
    assert "diffusion_pytorch_model.safetensors.index.json: names shards that are not there" in str(raised.value)
    assert missing in str(raised.value)
    assert "00001-of-00002" not in str(raised.value)


@pytest.mark.parametrize("index", [{}, {"weight_map": 5}, {"weight_map": {"a.weight": 5}}, {"weight_map": []}, []])
def test_index_that_maps_no_names_to_files_is_refused_by_name(tmp_path: Path, index: object) -> None:
    _shard(tmp_path, index)
    with pytest.raises(UserError, match=r"diffusion_pytorch_model\.safetensors\.index\.json: "):
        read_headers(tmp_path)


@pytest.mark.parametrize("name", ["no-such-folder", "empty"])
def test_folder_without_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no \.safetensors weights"):
        read_headers(tmp_path / name)


def test_weights_of_full_precision_are_taken_beside_a_half_precision_variant(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, dtype=torch.float16)}, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.safetensors")
    assert read_headers(tmp_path)["weight"].dtype == "F32"


def test_index_of_full_precision_is_taken_beside_a_half_precision_variant(tmp_path: Path) -> None:
    for variant, dtype in (("", torch.float32), (".fp16", torch.float16)):
        shard = f"diffusion_pytorch_model{variant}-00001-of-00001.safetensors"
        save_file({"weight": torch.ones(2, dtype=dtype)}, tmp_path / shard)
        index = tmp_path / f"diffusion_pytorch_model.safetensors.index{variant}.json"
        index.write_text(json.dumps({"weight_map": {"weight": shard}}))
    assert read_headers(tmp_path)["weight"].dtype == "F32"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), (b"{", "cannot be read"), (b"\xff", "cannot be read"), (b"[]", "is not a JSON object")],
)
def test_json_that_is_no_object_is_refused_by_name(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"^{file}:? {reason}"):
        read_json(file)


def test_pipeline_folder_is_found_by_absolute_and_relative_path(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_pipeline(str(tiny), option="model.path") == tiny
    monkeypatch.chdir(tiny.parent)
    for path in (tiny.name, f"./{tiny.name}", f"../{tiny.parent.name}/{tiny.name}/"):
        assert find_pipeline(path, option="model.path").resolve() == tiny


@pytest.mark.parametrize("path", ["{}/no", "./no", "../no/no", "~/no", "no", "a/b/c", "{}/file", ""])
def test_missing_folder_is_refused_without_asking_the_hub(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    path = path.format(tmp_path)
    with pytest.raises(UserError) as raised:
        find_pipeline(path, option="model.path")
    assert str(raised.value).startswith("model.path: ")
    assert path in str(raised.value)


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("path", ["models/wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"])
def test_repository_that_cannot_be_had_is_refused_by_option(path: str) -> None:
    with pytest.raises(UserError) as raised:
        find_pipeline(path, option="--model")
    message = str(raised.value)
    assert message.startswith(f"--model: {path} is no local folder, and the hub does not give it (")
    assert "\n" not in message


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network and an empty cache for the hub's library, which reads the environment when imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_folder_that_is_no_pipeline_is_refused(pipeline: Path) -> None:
    (pipeline / "model_index.json").unlink()
    with pytest.raises(UserError, match=f"^model.path: {pipeline} is not a diffusers pipeline.*model_index.json"):
        find_pipeline(str(pipeline), option="model.path")


def test_pipeline_of_another_class_is_refused_with_both_classes(pipeline: Path) -> None:
    index = json.loads((pipeline / "model_index.json").read_text())
    (pipeline / "model_index.json").write_text(json.dumps({**index, "_class_name": "FluxPipeline"}))
    with pytest.raises(UserError) as raised:
        check_pipeline(pipeline, get_family("wan"), option="model.path")
    assert str(raised.value).startswith(f"model.path: {pipeline} holds a FluxPipeline, the variant needs a WanPipeline")


def test_pipeline_without_a_transformer_is_refused(pipeline: Path) -> None:
    check_pipeline(pipeline, get_family("wan"), option="model.path")
    shutil.rmtree(pipeline / "transformer")
    with pytest.raises(UserError, match=f"^model.path: {pipeline} lacks transformer/config.json"):
        check_pipeline(pipeline, get_family("wan"), option="model.path")


@pytest.mark.parametrize(
    ("settings", "shift"),
    [
        ({"flow_shift": 5.0}, 5.0),
        ({"shift": 3}, 3.0),
        ({"flow_shift": 5.0, "shift": 3.0}, 5.0),
        ({}, 1.5),
        ({"flow_shift": None}, 1.5),
        (None, 1.5),
    ],
)
def test_shift_is_the_schedulers_own_or_the_default(
    tmp_path: Path, settings: dict[str, float | None] | None, shift: float
) -> None:
    (tmp_path / "scheduler").mkdir()
    if settings is not None:
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
    assert get_family("wan").shift(scheduler_settings(tmp_path, {"flow_shift": 1.5}), 100) == shift


def _flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("size", "position"),
    [(100, 0), (100, 50), (100, 99), (MIB, MIB // 2 + 7), (MIB, MIB - 1), (3 * MIB, 0), (3 * MIB, 3 * MIB - 1)],
)
def test_fingerprint_changes_with_a_single_bit(tmp_path: Path, size: int, position: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    before = fingerprint(tmp_path)
    _flip(file, position)
    assert fingerprint(tmp_path) != before


def test_fingerprint_of_a_large_file_changes_when_a_stretch_of_it_does(tmp_path: Path) -> None:
    # A changed tensor of 100 KiB anywhere in 4 MiB: blocks of 16 KiB start every (4 MiB - 16 KiB) / 63 < 66 KiB.
    file = tmp_path / "model.safetensors"
    for start in range(0, 4 * MIB - 100 * 1024, 300_001):
        content = bytearray(4 * MIB)
        file.write_bytes(content)
        before = fingerprint(tmp_path)
        content[start : start + 100 * 1024] = b"\1" * (100 * 1024)
        file.write_bytes(content)
        assert fingerprint(tmp_path) != before


def test_fingerprint_changes_with_name_size_number_and_place_of_files(tmp_path: Path) -> None:
    def written(*files: tuple[str, bytes]) -> str:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        for name, content in files:
            (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "model" / name).write_bytes(content)
        return fingerprint(tmp_path / "model")

    sets: list[tuple[tuple[str, bytes], ...]] = [
        (("a", b"xy"),),
        (("b", b"xy"),),
        (("a", b"xyz"),),
        (("a", bytes(3 * MIB)),),
        (("a", bytes(3 * MIB + 1)),),
        (("a", b"xy"), ("b", b"")),
        (("a", b"x"), ("b", b"y")),
        (("sub/a", b"xy"),),
        (("a", b""), ("b", b"xy")),
    ]
    assert len({written(*files) for files in sets}) == len(sets)


def test_fingerprint_is_that_of_the_content_alone(tiny: Path, pipeline: Path) -> None:
    file = pipeline / "vae" / "config.json"
    os.utime(file, (time.time() - 1000, time.time() - 1000))
    assert fingerprint(pipeline / "vae") == fingerprint(tiny / "vae")
    assert fingerprint(tiny / "vae") != fingerprint(tiny / "text_encoder")


def test_atomic_file_puts_the_new_content_in_place(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    for content in ("old", "new"):
        with atomic_file(file) as temporary:
            assert temporary.parent == tmp_path
            temporary.write_text(content)
            assert not file.exists() or file.read_text() == "old"
        assert file.read_text() == content
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("written", [True, False])
def test_failed_write_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, error: type[BaseException], written: bool
) -> None:
    file = tmp_path / "x.txt"
    file.write_text("old")
    with pytest.raises(error), atomic_file(file) as temporary:
        if written:
            temporary.write_text("half of the n")
        raise error
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_failed_first_write_leaves_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"), atomic_file(tmp_path / "x.txt") as temporary:
        temporary.write_text("half")
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []


def test_modelscope_is_a_hub_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[object, ...]] = []

    def snapshot_download(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns, ignore_patterns))
        return str(tmp_path)

    module = types.ModuleType("modelscope")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)
    monkeypatch.setenv("FLOWSHARD_HUB", "modelscope")
    assert download("Wan-AI/Wan2.1", option="model.path", allow_patterns=["*.pth"]) == tmp_path
    assert asked == [("Wan-AI/Wan2.1", ["*.pth"], None)]
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match="modelscope is not installed"):
        download("Wan-AI/Wan2.1", option="model.path")
    monkeypatch.setenv("FLOWSHARD_HUB", "elsewhere")
    with pytest.raises(UserError, match="FLOWSHARD_HUB: 'elsewhere' is not huggingface or modelscope"):
        download("Wan-AI/Wan2.1", option="model.path")
