"""Padding of texts, filled so that gradients say more than how float32 rounds."""

from dataclasses import replace

import torch

from flowshard.objective.randomness import generator
from flowshard.train.batches import MicroBatch

TEXT = "prompt_embeds"


def fill_padding(batch: MicroBatch, step: int) -> MicroBatch:
    """The batch, with noise in place of the zeros that fill its texts up, alike under every layout.

    Wan looks at all its 512 text tokens, nearly all of them equal padding. The gradient of the layer that makes keys is
    then a sum of hundreds of equal terms that all but cancel, and one process gets it wrong by as much as layouts may
    differ (8e-6 of its norm, against float64); with tokens that differ, by a tenth of that (`tests/test_float64.py`).

    Args:
        batch: in whose `prompt_embeds`, (batch, tokens, width), rows of zeros are padding.
        step: the optimizer update, from 0.
    """
    texts = batch.conditions.get(TEXT)
    if texts is None:
        return batch
    padding = ~texts.any(dim=-1)
    if not padding.any():
        return batch
    filled = texts.clone()
    for place, position in enumerate(batch.positions):
        own = ~padding[place]
        size = float(texts[place][own].float().square().mean().sqrt()) if own.any() else 1.0
        noise = torch.randn(texts.shape[1:], generator=generator(0, "parity padding", step, position)) * size
        filled[place] = torch.where(own[:, None], texts[place], noise.to(texts.dtype))
    return replace(batch, conditions={**batch.conditions, TEXT: filled})
