"""The memory that `flowshard plan` answers, and what sequence parallelism sends, against real runs of two processes."""

import json
from pathlib import Path

import diffusers
import pytest

from flowshard.families.tiny import write_tiny_pipeline
from flowshard.plan.command import make_plan
from flowshard.plan.inputs import PlanOptions, check_plan
from tests import launch

RUNS = {
    "ddp full keep": [],
    "ddp lora recompute": [],
    "zero2 full recompute": [],
    "zero3 lora keep": [],
    "fsdp2 full recompute": [],
    "fsdp2 lora keep": [],
    "ddp lora recompute, two processes a sample": ["sequence: 2"],
}


def write_config(folder: Path, number: int, name: str, model: Path, clips: Path) -> Path:
    strategy, method, policy = name.split(",")[0].split()
    layout = [f"strategy: {strategy}", *RUNS[name]]
    if strategy.startswith("zero"):  # its default buckets, of 2 GB, would hide all that is to be seen
        buckets = folder / "deepspeed.json"
        buckets.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 500000}}), encoding="utf-8")
        layout.append(f"deepspeed: {buckets}")
    file = folder / f"{number}.yaml"
    file.write_text(
        f"""
output: {folder / f"run-{number}"}
device: cpu
model: {{variant: wan2.1-t2v-1.3b, path: {model}, dtype: bfloat16}}
data: {{metadata: {clips / "metadata.csv"}, height: 128, width: 192, frames: 9, cache: {folder / "cache"}}}
train: {{steps: 3, global_batch: 2, method: {method}}}
lora: {{rank: 16, alpha: 16}}
layout: {{{", ".join(layout)}}}
memory: {{activations: {policy}}}
save: {{resumable: false}}
log: {{flops: false, profile: true}}
""",
        encoding="utf-8",
    )
    return file


@pytest.mark.slow
def test_within_ten_percent_of_what_is_alive(tmp_path: Path, clips: Path) -> None:
    model = tmp_path / "model"
    write_tiny_pipeline("wan2.1-t2v-1.3b", model, seed=0)
    diffusers.WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=32, text_dim=64, ffn_dim=1024, num_layers=5
    ).save_pretrained(model / "transformer")
    files = [write_config(tmp_path, number, name, model, clips) for number, name in enumerate(RUNS)]
    done = launch.torchrun(2, ["tests.workers.memory", *map(str, files)], more={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    measured = [json.loads(line)["peak"] for line in done.stdout.splitlines() if line.startswith('{"config"')]
    for file, name, peak in zip(files, RUNS, measured, strict=True):
        plan = make_plan(check_plan(PlanOptions(file, [], 2, 1, None, None, None, None)))
        (own,) = (one for one in plan.layouts if one.candidate.configured)
        assert own.memory.peak == pytest.approx(peak, rel=0.1), name
        if RUNS[name]:
            line = Path(plan.question.config.output, "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
            # One micro-batch a step, and two processes that send as much.
            assert own.traffic.sequence == pytest.approx(json.loads(line)["bytes_communication"], rel=0.01), name
