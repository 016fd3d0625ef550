"""`python -m flowshard`, which is what torchrun and accelerate start."""

import sys

from flowshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
