"""Flow matching (https://arxiv.org/abs/2210.02747): the noisy input, its target and the loss."""

import torch


def add_noise(clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """`(1 - sigma) * clean + sigma * noise`.

    Args:
        clean: latents of shape (batch, ...).
        noise: standard normal, shaped like `clean`.
        sigma: noise level of each sample, shape (batch,).
    """
    sigma = sigma.view(-1, *[1] * (clean.ndim - 1))
    return (1 - sigma) * clean + sigma * noise


def sample_losses(prediction: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The squared error to the target `noise - clean`, averaged over each sample's own elements in float32.

    Returns:
        float32 of shape (batch,). A sample counts alike whatever its size: the loss of a step is the mean of these,
        times their weights, over the global batch.
    """
    error = prediction.float() - (noise.float() - clean.float())
    return error.square().flatten(1).mean(dim=1)
