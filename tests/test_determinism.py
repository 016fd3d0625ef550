"""What may change the numbers of a run and what may not."""

from pathlib import Path

import pytest
import torch

from tests import runs

SPLITS = (1, 2, 4)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("optimizer", ["torch.optim.SGD", "adamw"])
def test_micro_batch_does_not_change_the_weights(
    tiny: Path, clips: Path, tmp_path: Path, method: str, optimizer: str
) -> None:
    rate = 1e-2 if "SGD" in optimizer else 1e-4
    common = (f"train.method={method}", f"train.optimizer={optimizer}", f"train.learning_rate={rate}", "train.steps=5")
    results = {}
    for micro in SPLITS:
        config = runs.config(tiny, clips, tmp_path / f"micro{micro}", *common, f"train.micro_batch={micro}")
        results[micro] = (runs.weights(runs.run(config)), [line["loss"] for line in runs.metrics(config)])
    bound = 1e-6 if "SGD" in optimizer else 1e-5
    for micro in SPLITS[1:]:
        assert runs.distance(results[micro][0], results[1][0]) < bound
        assert results[micro][1] == pytest.approx(results[1][1], rel=1e-6)


def test_one_seed_gives_bitwise_equal_runs_and_another_differs(tiny: Path, clips: Path, tmp_path: Path) -> None:
    outcomes: list[tuple[dict[str, torch.Tensor], list[float]]] = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(outcomes))  # the global generator must not matter
        config = runs.config(tiny, clips, tmp_path / name, f"seed={seed}")
        outcomes.append((runs.weights(runs.run(config)), [line["loss"] for line in runs.metrics(config)]))
    (first, first_losses), (second, second_losses), (other, other_losses) = outcomes
    assert first_losses == second_losses
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first_losses != other_losses
    assert runs.distance(other, first) > 1e-3


def test_a_run_leaves_the_global_generator_alone(tiny: Path, clips: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    runs.run(runs.config(tiny, clips, tmp_path / "run"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_cached_and_online_encoding_train_bitwise_alike(tiny: Path, clips: Path, tmp_path: Path) -> None:
    cached = runs.config(tiny, clips, tmp_path / "cached")
    online = runs.config(tiny, clips, tmp_path / "online", "data.cache=off")
    first, second = runs.weights(runs.run(cached)), runs.weights(runs.run(online))
    assert [line["loss"] for line in runs.metrics(cached)] == [line["loss"] for line in runs.metrics(online)]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not Path(online.output, "cache").exists()


def test_more_steps_continue_the_same_run(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """Step t depends on t alone, not on how many steps are planned."""
    short = runs.config(tiny, clips, tmp_path / "short", "train.steps=2")
    long = runs.config(tiny, clips, tmp_path / "long", "train.steps=4")
    runs.run(short)
    runs.run(long)
    assert [line["loss"] for line in runs.metrics(short)] == [line["loss"] for line in runs.metrics(long)[:2]]


def test_bfloat16_follows_float32(tiny: Path, clips: Path, tmp_path: Path) -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        config = runs.config(tiny, clips, tmp_path / dtype, f"model.dtype={dtype}", "train.steps=10")
        runs.run(config)
        losses[dtype] = [line["loss"] for line in runs.metrics(config)]
    differences = [abs(a - b) for a, b in zip(losses["float32"], losses["bfloat16"], strict=True)]
    assert sum(differences) / len(differences) < 1e-2
    assert losses["float32"] != losses["bfloat16"], "bfloat16 must have been used"


def test_overfitting_two_clips_halves_the_loss_on_unseen_noise(tiny: Path, clips: Path, tmp_path: Path) -> None:
    """The loss before and after is taken at the same held-out noise, which no training step has seen."""
    data = tmp_path / "two"
    data.mkdir()
    for name in ("clip_0.mp4", "clip_2.mp4"):
        (data / name).symlink_to(clips / name)
    (data / "metadata.csv").write_text("video,prompt\nclip_0.mp4,a rabbit\nclip_2.mp4,a stretch\n")
    probe = ("train.method=full", "train.learning_rate=0", "train.steps=8", "seed=99")
    before = runs.config(tiny, data, tmp_path / "before", *probe)
    runs.run(before)
    trained = runs.run(
        runs.config(tiny, data, tmp_path / "run", "train.method=full", "train.learning_rate=1e-3", "train.steps=300")
    )
    after_model = tmp_path / "trained"
    after_model.mkdir()
    for part in tiny.iterdir():
        (after_model / part.name).symlink_to(trained / "transformer" if part.name == "transformer" else part)
    after = runs.config(after_model, data, tmp_path / "after", *probe)
    runs.run(after)

    def mean_loss(name: str) -> float:
        lines = runs.metrics({"before": before, "after": after}[name])
        return float(sum(line["loss"] for line in lines) / len(lines))

    assert mean_loss("after") < 0.5 * mean_loss("before")
