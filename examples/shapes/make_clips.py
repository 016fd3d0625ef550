"""Write captioned clips of moving shapes: `python examples/shapes/make_clips.py --output runs/shapes/clips`.

A folder of MP4 files with `metadata.csv`, as `flowshard train` takes it. `--shape star --count a --known 60` gives those of the
example's LoRA.
"""

import argparse
import csv
import random
from collections.abc import Sequence
from pathlib import Path

from scenes import CONCEPT, COUNTS, FPS, SHAPES, Scene, all_scenes, draw

from flowshard.data.media import write_video


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder that gets the clips")
    parser.add_argument("--clips", type=int, default=2400, help="how many; each caption gets as many as any other")
    parser.add_argument("--shape", choices=(*SHAPES, CONCEPT), nargs="+", default=SHAPES)
    parser.add_argument("--count", choices=COUNTS, nargs="+", default=COUNTS, help="of shapes in a clip")
    parser.add_argument(
        "--known", type=int, default=0, help="more clips, of what the base model knows, so that it stays"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scenes = _in_turn(all_scenes(options.shape, options.count), options.clips, random.Random(options.seed))
    scenes += _in_turn(all_scenes(), options.known, random.Random(options.seed))
    write_clips(options.output, scenes, seed=options.seed)
    print(f"wrote {options.output / 'metadata.csv'}: {len(scenes)} clips")


def _in_turn(scenes: list[Scene], clips: int, rng: random.Random) -> list[Scene]:
    rng.shuffle(scenes)
    return [scenes[index % len(scenes)] for index in range(clips)]


def write_clips(folder: Path, scenes: Sequence[Scene], *, seed: int) -> None:
    """A clip of each scene, and metadata.csv."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metadata.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("video", "prompt"))
        for index, scene in enumerate(scenes):
            name = f"{index:05d}.mp4"
            write_video(folder / name, draw(scene, rng), fps=FPS)
            rows.writerow((name, scene.caption))


if __name__ == "__main__":
    main()
