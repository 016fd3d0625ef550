"""DeepSpeed's private names, its releases, and the failure that users report."""

import importlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from flowshard.errors import UserError
from flowshard.parallel import deepspeed_config
from flowshard.train.inputs import check_inputs
from tests import runs
from tests.launch import python
from tests.test_layouts_agree import SMALL

POLICIES = ("keep", "recompute", "selective", "offload")


def test_private_names_are_still_there() -> None:
    """Those that `parallel/strategies/deepspeed.py` touches."""
    assert callable(importlib.import_module("deepspeed.comm.torch").build_shm_op)
    optimizer = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
    assert callable(optimizer._lazy_init_hp_params_optimizer_state)
    assert "_hp_optimizer_states_linked" in Path(sys.modules[optimizer.__module__].__file__ or "").read_text()
    for module in ("stage_1_and_2", "stage3"):  # known before the optimizer's own step
        text = Path(importlib.import_module(f"deepspeed.runtime.zero.{module}").__file__ or "").read_text()
        step = text[text.index("    def step(self, closure=None)") :]
        assert step.index("self._global_grad_norm = scaled") < step.index("self._optimizer_step(")


@pytest.mark.parametrize(
    ("installed", "overrides", "message"),
    [
        ("0.16.8", ["layout.strategy=zero3"], "deepspeed 0.16.8 is too old; install deepspeed>=0.19.2"),
        ("0.18.9", ["layout.strategy=zero2"], "zero2 does not work with deepspeed 0.18.9; install deepspeed>=0.19.2"),
        ("0.16.9", ["layout.strategy=zero1"], "zero1 does not work with deepspeed 0.16.9"),
        ("0.18.9", ["layout.strategy=zero3", "model.dtype=bfloat16"], "with deepspeed 0.18.9, zero3 trains LoRA with"),
        ("0.18.9", ["layout.strategy=zero3", "train.method=full"], "with deepspeed 0.18.9, zero3 trains LoRA with"),
    ],
)
def test_what_a_release_cannot_do_is_refused(
    tiny: Path,
    clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: str,
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(deepspeed_config, "version", lambda _: installed)
    with pytest.raises(UserError, match=message):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", *overrides), {"WORLD_SIZE": "2"})


@pytest.mark.parametrize("installed", ["0.19.2", "0.19.8", "0.20.0", "1.0"])
def test_supported_releases_are_accepted(
    tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(deepspeed_config, "version", lambda _: installed)
    check_inputs(runs.config(tiny, clips, tmp_path / "run", "layout.strategy=zero1"), {"WORLD_SIZE": "2"})


def test_a_missing_deepspeed_is_named(tiny: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(deepspeed_config, "version", missing)
    with pytest.raises(
        UserError, match=r"zero3 needs DeepSpeed, .* install flowshard\[deepspeed\] or use layout.strat"
    ):
        check_inputs(runs.config(tiny, clips, tmp_path / "run", "layout.strategy=zero3"), {"WORLD_SIZE": "2"})


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with another release of DeepSpeed, to be put before the installed one."""
    folder = tmp_path_factory.mktemp("deepspeed") / request.param
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), f"deepspeed=={request.param}"], check=True)
    return str(folder)


def _run(module: list[str], release: str) -> subprocess.CompletedProcess[str]:
    return python(["-m", *module], more={"PYTHONPATH": release}, timeout=None)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.16.9", "0.18.9", "0.19.2"], indirect=True)
def test_plain_checkpointing_fails_where_ours_passes(tiny: Path, clips: Path, tmp_path: Path, release: str) -> None:
    """The CheckpointError of users, and ZeRO-3 LoRA in float32 with every activation policy on the same release."""
    plain = _run(["tests.workers.plain_checkpointing", str(tiny / "transformer")], release)
    assert plain.returncode != 0
    assert "CheckpointError: torch.utils.checkpoint: Recomputed values" in plain.stderr
    assert "one update made" not in plain.stdout
    data = [f"model.path={tiny}", f"data.metadata={clips / 'metadata.csv'}", *SMALL, "lora.targets=[q]", "lora.rank=8"]
    layouts = [f"--layout=zero3:2,activations={policy}" for policy in POLICIES]
    ours = _run(["flowshard", "parity", "examples/wan_lora.yaml", *data, "--layout=single", *layouts], release)
    assert ours.returncode == 0, ours.stdout + ours.stderr[-3000:]


def test_plain_checkpointing_passes_on_the_installed_release(tiny: Path) -> None:
    """So that the failure above is known to be the release's, and not the script's."""
    plain = _run(["tests.workers.plain_checkpointing", str(tiny / "transformer")], "")
    assert plain.returncode == 0, plain.stderr[-3000:]
    assert "one update made" in plain.stdout


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.19.2"], indirect=True)
def test_the_oldest_supported_release_trains_in_full(tiny: Path, clips: Path, release: str) -> None:
    data = [f"model.path={tiny}", f"data.metadata={clips / 'metadata.csv'}", *SMALL]
    data += ["train.method=full", "train.learning_rate=1e-5"]
    layouts = [f"--layout={name}" for name in ("single", "zero1:2", "zero2:2", "zero3:2,activations=offload")]
    done = _run(["flowshard", "parity", "examples/wan_full.yaml", *data, *layouts], release)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
