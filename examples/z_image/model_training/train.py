"""Trains Z-Image from the options of DiffSynth-Studio's script of this name; `--help` lists them."""

from flowshard.compat.diffsynth import program

if __name__ == "__main__":
    program("z-image")
