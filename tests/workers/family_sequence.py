"""The stock transformer of every family against itself with its tokens divided: output and every gradient.

    torchrun --nproc-per-node N -m tests.workers.family_sequence [--pictures] VARIANT=TRANSFORMER_FOLDER ...

With `--pictures` the samples have reference pictures.
Prints a line for every variant, split and case that held.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist

from flowshard.families import Family, find_variant
from flowshard.libraries import quiet_libraries
from flowshard.parallel.plan import GroupTokens, apply_sequence_plan
from tests.workers.sequence import draw, error, make_group

Tensors = dict[str, torch.Tensor]
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "wan": {"clip": (16, 3, 4, 6), "prime number of tokens": (16, 1, 2, 26)},
    "qwen-image": {"15 tokens": (64, 3, 5)},
    "flux": {"15 tokens": (64, 3, 5)},
    "flux2": {"15 tokens": (128, 3, 5)},
    "z-image": {"60 tokens": (16, 12, 20)},
}
"""Of latents, by family and case."""
PROMPTS: dict[str, tuple[int, ...]] = {"prompts of 2 and 40 tokens": (2, 40), "a prompt of 3 tokens": (3,)}
"""Tokens of the prompts of a batch. Eight processes have more members than some prompts have tokens."""
REFERENCES = ((2, 3), (4, 2))
"""Height and width of the latents of reference pictures: 14 tokens."""
PADDED = ("wan", "flux", "flux2")
"""Families whose prompts all have the same length. It is a short one here: in a sum over hundreds of equal keys of padding
rounding would be more than the bounds allow."""
OWN_TIMESTEPS = "a timestep for each token"


def cases(family: Family, config: Any, *, pictures: bool) -> dict[str, Callable[[torch.nn.Module], torch.Tensor]]:
    """From a model to its prediction."""
    found: dict[str, Callable[[torch.nn.Module], torch.Tensor]] = {}
    for shape_name, shape in SHAPES[family.name].items():
        for prompts_name, lengths in PROMPTS.items():
            if family.name in PADDED:
                lengths = (lengths[-1],) * len(lengths)
            prompts = [_prompt(family, config, length) for length in lengths]
            if family.name in PADDED:
                conditions = {name: torch.stack([prompt[name] for prompt in prompts]) for name in prompts[0]}
            else:
                conditions = family.batch_conditions(prompts)
            if pictures:
                for place, size in enumerate(REFERENCES):
                    conditions[f"reference.{place}"] = draw(len(lengths), shape[0], *size, seed=place)
            if family.takes_guidance(config):
                conditions["guidance"] = torch.full((len(lengths),), 3.5)
            noisy, sigma = draw(len(lengths), *shape, seed=1), torch.tensor([0.7, 0.2][: len(lengths)])

            def predict(
                model: torch.nn.Module,
                noisy: torch.Tensor = noisy,
                sigma: torch.Tensor = sigma,
                conditions: Tensors = conditions,
            ) -> torch.Tensor:
                device = next(model.parameters()).device
                moved = {name: one.to(device) for name, one in conditions.items()}
                return family.denoise(model, noisy.to(device), sigma.to(device), moved)

            found[f"{'with pictures, ' if pictures else ''}{shape_name}, {prompts_name}"] = predict
    if family.name == "wan":
        found[OWN_TIMESTEPS] = _per_token
    return found


def _prompt(family: Family, config: Any, length: int) -> Tensors:
    width = next(config[name] for name in ("joint_attention_dim", "text_dim", "cap_feat_dim") if name in config)
    condition = {"prompt_embeds": draw(length, width, seed=length)}
    if family.name == "flux":
        condition["pooled_prompt_embeds"] = draw(config["pooled_projection_dim"], seed=2)
    return condition


def _per_token(model: Any) -> torch.Tensor:
    timestep = torch.tensor([700.0, 200.0])[:, None] * torch.linspace(0, 1, 18)
    device = next(model.parameters()).device
    prediction: torch.Tensor = model(
        hidden_states=draw(2, 16, 3, 4, 6, seed=1).to(device),
        timestep=timestep.to(device),
        encoder_hidden_states=draw(2, 5, model.config.text_dim, seed=2).to(device),
        return_dict=False,
    )[0]
    return prediction


def run(model: torch.nn.Module, predict: Callable[[torch.nn.Module], torch.Tensor]) -> tuple[torch.Tensor, Tensors]:
    model.zero_grad()
    output = predict(model)
    (output * draw(*output.shape, seed=3).to(output.device)).sum().backward()
    gradients = {name: p.grad.clone().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach().cpu(), gradients


def compare(family: Family, folder: Path, variant: str, *, pictures: bool) -> None:
    """All splits and cases of a family."""
    world = dist.get_world_size()
    model_class = getattr(diffusers, family.transformer_class)
    stock = model_class.from_pretrained(folder)
    heads = stock.config[family.heads_setting]
    made = cases(family, stock.config, pictures=pictures)
    expected = {name: (predict, *run(stock, predict)) for name, predict in made.items()}
    for ulysses in (number for number in range(1, world + 1) if world % number == 0 and heads % number == 0):
        model = model_class.from_pretrained(folder)
        group = make_group(ulysses, world // ulysses)
        apply_sequence_plan(model, family.sequence_plan, group)
        attentions = len(family.sequence_plan(model, GroupTokens(group)).processors)
        for case, (predict, output, gradients) in expected.items():
            before = group.traffic.exchanges, group.traffic.gathers
            found, parts = run(model, predict)
            assert error(found, output) <= 1e-5, (case, error(found, output))
            assert parts.keys() == gradients.keys()
            largest = max(float(gradient.norm()) for gradient in gradients.values())
            for name, part in parts.items():
                dist.all_reduce(part)  # each process has its part of the sum
                off = float((part - gradients[name]).norm())
                scale = max(float(gradients[name].norm()), 1e-4 * largest)
                assert off / scale <= 1e-5, (variant, case, name, off / scale)
            # Two exchanges for every divided attention forward, two backward. A gather at the end; after each of the two
            # refiners of Z-Image one more, whose gradients are summed.
            after = group.traffic.exchanges, group.traffic.gathers
            wanted = 4 * attentions * (ulysses > 1), 5 if family.name == "z-image" else 1
            assert (after[0] - before[0], after[1] - before[1]) == wanted, (variant, before, after, wanted)
            if dist.get_rank() == 0:
                sys.stdout.write(f"{variant}, ulysses {ulysses} x ring {world // ulysses}: {case}\n")


def main(arguments: list[str]) -> None:
    dist.init_process_group("gloo")
    pictures = arguments[0] == "--pictures"
    for argument in arguments[pictures:]:
        variant, _, folder = argument.partition("=")
        compare(find_variant(variant, option="VARIANT")[0], Path(folder), variant, pictures=pictures)
    dist.destroy_process_group()


if __name__ == "__main__":
    quiet_libraries()
    main(sys.argv[1:])
