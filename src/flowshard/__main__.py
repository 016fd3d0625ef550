"""`python -m flowshard`, which is what torchrun and accelerate start."""

from flowshard.cli import program

if __name__ == "__main__":
    program()
