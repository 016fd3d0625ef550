"""Trains Wan from the options of DiffSynth-Studio's earlier script of this name; `--help` lists them."""

from flowshard.compat.wan_t2v import program

if __name__ == "__main__":
    program()
