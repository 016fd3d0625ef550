"""Train the small Wan VAE of this folder: `python examples/shapes/train_vae.py --output runs/shapes/vae`.

Moving shapes, moving polygons of any colour, and pieces of the bunny clips: first single frames, then clips, so that time is
learnt on top of a picture that is right already. `--start FOLDER` takes a VAE that is trained so and goes on with its decoder
alone, which leaves latents as they are.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import diffusers
import numpy as np
import torch
from scenes import FRAMES, SIDE, all_scenes, draw, draw_polygons

from flowshard.data.media import read_frames

BUNNY = Path(__file__).parent.parent / "data" / "bunny"
SIZES = {"base_dim": 12, "num_res_blocks": 1, "is_residual": True}
"""Of the VAE: 16 channels of latents, 8 times smaller in space and 4 times in time, as in Wan 2.1; with the shortcuts around
changes of size that Wan 2.2 has, without which a short training comes less far."""
KL = 3e-4
"""Weight of the divergence from a normal distribution, averaged over latent numbers."""
RATE = 2e-3
PIECE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder that gets the VAE")
    parser.add_argument("--pictures", type=int, default=900, help="steps with single frames")
    parser.add_argument("--clips", type=int, default=1800, help="steps with clips")
    parser.add_argument("--start", type=Path, help="folder of a VAE whose decoder is trained further, with clips")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    data = Data(random.Random(options.seed))

    def clips(step: int) -> torch.Tensor:
        # The middle of the VAE attends to the whole picture, so it must see whole ones too.
        return data.whole(2) if step % 5 == 0 else data.pieces(8)

    if options.start is None:
        vae = diffusers.AutoencoderKLWan(**SIZES)
        initialise(vae)
        train(vae, lambda step: data.pieces(16)[:, :, step % FRAMES, None], options.pictures, decay=False)
        train(vae, clips, options.clips, decay=True)
        measure_latents(vae, data)
    else:
        vae = diffusers.AutoencoderKLWan.from_pretrained(options.start)
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
        train(vae, clips, options.clips, decay=True)
    vae.eval().save_pretrained(options.output)
    print(f"wrote {options.output}")


def initialise(vae: diffusers.AutoencoderKLWan) -> None:
    """Begin with what leaves every frame to itself: a VAE of pictures, which passes on the scale of what it gets."""
    with torch.no_grad():
        for name, layer in vae.named_modules():
            if name.endswith("time_conv"):
                torch.nn.init.zeros_(layer.weight)
                torch.nn.init.zeros_(layer.bias)
                size = layer.in_channels
                for part in range(0, layer.out_channels, size):  # two frames of one: both are that one
                    layer.weight[part : part + size, :, -1, 0, 0] = torch.eye(size)
            elif isinstance(layer, torch.nn.Conv3d) and layer.kernel_size[0] == 3:
                now = layer.weight[:, :, -1]
                now.normal_(0, now[0].numel() ** -0.5)
                layer.weight[:, :, :-1] = 0
            elif isinstance(layer, torch.nn.Conv2d) and layer.kernel_size[0] == 3:
                layer.weight.normal_(0, layer.weight[0].numel() ** -0.5)
        # A posterior as wide as a normal distribution would drown the first signals.
        vae.quant_conv.bias[vae.config.z_dim :] = -6


def train(vae: diffusers.AutoencoderKLWan, batch: Callable[[int], torch.Tensor], steps: int, *, decay: bool) -> None:
    """Adam on all that requires a gradient, with batches of shape (batch, 3, frames, side, side); `decay` lowers the learning rate to 0 at the end."""
    trained = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    began, shown = time.perf_counter(), None
    for step in range(1, steps + 1):
        rate = RATE * min(1.0, step / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps) if decay else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        clips = batch(step)
        posterior = vae.encode(clips).latent_dist
        error = vae.decode(posterior.sample()).sample - clips
        divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        squared = error.square().mean()
        (4 * squared + 0.5 * error.abs().mean() + KL * divergence).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown = squared.item() if shown is None else 0.98 * shown + 0.02 * squared.item()
        if step % 100 == 0:
            ratio, pace = 10 * math.log10(4 / shown), (time.perf_counter() - began) / step
            print(f"step {step}/{steps} of {clips.shape[2]} frames: {ratio:.1f} dB, {pace:.2f} s/step", flush=True)


def measure_latents(vae: diffusers.AutoencoderKLWan, data: "Data") -> None:
    """Put mean and spread of each channel of the latents of shapes into the VAE's config, where the pipeline reads them."""
    with torch.no_grad():
        latents = torch.cat([vae.encode(data.shapes(8)).latent_dist.mode() for _ in range(16)])
    deviation, mean = torch.std_mean(latents, dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())


class Data:
    """Endless float batches of shape (batch, 3, FRAMES, side, side) in [-1, 1]."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._scenes = all_scenes()
        self._bunny = [
            read_frames(path, height=height, width=width, frames=25, where=str(path))
            for path in sorted(BUNNY.glob("clip_*.mp4"))
            for height, width in ((64, 116), (88, 160))
        ]

    def shapes(self, batch: int) -> torch.Tensor:
        return _as_batch([draw(self._rng.choice(self._scenes), self._rng) for _ in range(batch)])

    def whole(self, batch: int) -> torch.Tensor:
        return _as_batch([self._clip() for _ in range(batch)])

    def pieces(self, batch: int) -> torch.Tensor:
        return _as_batch([self._piece(self._clip()) for _ in range(batch)])

    def _clip(self) -> np.ndarray:
        kind = self._rng.random()
        if kind < 0.5:
            return draw(self._rng.choice(self._scenes), self._rng)
        if kind < 0.65:
            return self._polygons()
        clip = self._rng.choice(self._bunny)
        start = self._rng.randrange(len(clip) - FRAMES + 1)
        return self._cut(clip[start : start + FRAMES], SIDE)

    def _polygons(self) -> np.ndarray:
        rng = self._rng

        def colour() -> tuple[int, int, int]:
            return rng.randrange(256), rng.randrange(256), rng.randrange(256)

        background, moving = colour(), []
        for _ in range(rng.randint(1, 3)):
            corners = sorted(rng.uniform(0, math.tau) for _ in range(rng.randint(3, 9)))
            place, speed = [(rng.uniform(8, 56), rng.uniform(-3, 3)) for _ in range(2)], colour()
            moving.append(([(math.cos(t), math.sin(t), rng.uniform(4, 16)) for t in corners], place, speed))
        return np.stack(
            [
                draw_polygons(
                    [
                        ([(x + dx * t + r * u, y + dy * t + r * v) for u, v, r in corners], fill)
                        for corners, ((x, dx), (y, dy)), fill in moving
                    ],
                    background,
                )
                for t in range(FRAMES)
            ]
        )

    def _piece(self, clip: np.ndarray) -> np.ndarray:
        """The piece in which more happens, of two."""
        return max((self._cut(clip, PIECE) for _ in range(2)), key=lambda piece: float(piece.std()))

    def _cut(self, clip: np.ndarray, side: int) -> np.ndarray:
        top, left = (self._rng.randrange(size - side + 1) for size in clip.shape[1:3])
        return clip[:, top : top + side, left : left + side]


def _as_batch(clips: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3).float().div(127.5).sub(1)


if __name__ == "__main__":
    main()
