"""What Flowshard adds to a training step: its step against a bare loop over the stock diffusers transformer.

Both do the same work on the same samples: LoRA on a Wan-shaped model, forward, backward, clipping, AdamW. The two take
turns, so that a change in the machine's speed hits both, and the ratio of medians is printed.

    python benchmarks/overhead.py [--steps 20] [--size 64]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig, inject_adapter_in_model

from flowshard.config_file import load_config
from flowshard.data.dataset import Encoder, open_datasets
from flowshard.families.tiny import write_tiny_pipeline
from flowshard.libraries import quiet_libraries
from flowshard.objective.sigmas import NoiseLevels
from flowshard.parallel.processes import Processes
from flowshard.parallel.strategies import make_strategy
from flowshard.train.batches import StepBatches, stream
from flowshard.train.build import build_on_meta, fill, loss_function
from flowshard.train.inputs import check_inputs
from flowshard.train.optimizer import optimizer_factory

_REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the two medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of each loop (default: 20)")
    parser.add_argument("--size", type=int, default=128, help="height and width in pixels (default: 128)")
    options = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        ours, bare = _measure(Path(folder), steps=options.steps, size=options.size)
    print(f"flowshard    {1000 * ours:8.1f} ms/step")
    print(f"bare loop    {1000 * bare:8.1f} ms/step")
    print(f"ratio        {ours / bare:8.3f}")


def _measure(folder: Path, *, steps: int, size: int) -> tuple[float, float]:
    write_tiny_pipeline("wan2.1-t2v-1.3b", folder / "model", seed=0)
    config = load_config(
        _REPOSITORY / "examples/wan_lora.yaml",
        [
            f"model.path={folder / 'model'}",
            f"data.metadata={_REPOSITORY / 'examples/data/bunny/metadata.csv'}",
            f"output={folder / 'run'}",
            f"data.height={size}",
            f"data.width={size}",
            "model.dtype=float32",
            "train.global_batch=1",
        ],
    )
    inputs = check_inputs(config)
    device = torch.device("cpu")
    processes = Processes(inputs.layout, "cpu", timeout_minutes=1)
    encoder = Encoder(config, inputs.family, inputs.source, inputs.data.training, torch.float32, device)
    dataset, _ = open_datasets(encoder, inputs.data, config.cache_folder, processes=processes)
    levels = NoiseLevels(config.objective, inputs.shift)
    batches = StepBatches(dataset, inputs.family, config, inputs.layout, levels, guidance=None)
    build = build_on_meta(inputs)
    strategy = make_strategy(config, processes)
    fill(build, inputs, strategy)
    strategy.start(build.model, build.settings, optimizer_factory(config))
    loss_of = loss_function(inputs.family, dtype=torch.float32, device=device)

    stock = WanTransformer3DModel.from_pretrained(folder / "model" / "transformer")
    inject_adapter_in_model(LoraConfig(r=32, lora_alpha=32, target_modules=inputs.adapted), stock)
    trained = [parameter for parameter in stock.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01)
    constant = batches.largest_micro_batch()

    def our_step() -> None:
        strategy.backward(loss_of(strategy.model, next(micro_batches).tensors()))
        strategy.step(1.0)

    def bare_step() -> None:
        sigma = constant.sigma.view(-1, 1, 1, 1, 1)
        noisy = (1 - sigma) * constant.latents + sigma * constant.noise
        embeds = constant.conditions["prompt_embeds"]
        prediction = stock(noisy, constant.sigma * 1000, embeds, return_dict=False)[0]
        torch.nn.functional.mse_loss(prediction, constant.noise - constant.latents).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    micro_batches = stream(batches, range(steps + 1), ahead=True, pinned=False)
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for step in range(steps + 1):
        for name, run in (("ours", our_step), ("bare", bare_step)):
            start = time.perf_counter()
            run()
            if step:  # the first of each warms up
                times[name].append(time.perf_counter() - start)
    return statistics.median(times["ours"]), statistics.median(times["bare"])


if __name__ == "__main__":
    main()
