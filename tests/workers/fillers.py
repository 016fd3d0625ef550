"""Several commands that fill one cache at the same time, the first of which is killed. Prints how each ended."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from flowshard.config_file import load_config
from flowshard.libraries import quiet_libraries
from flowshard.train.encode import check_encoding, encode_samples


def main(file: Path, processes: int) -> None:
    config = load_config(file, [])
    folder = config.cache_folder
    assert folder is not None
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            encode_samples(check_encoding(config))
            os._exit(0)
        children.append(child)
    while not any(folder.rglob("*.safetensors")):
        time.sleep(0.01)
    os.kill(children[0], signal.SIGKILL)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.stdout.write(" ".join("killed" if end == -signal.SIGKILL else str(end) for end in ends) + "\n")


if __name__ == "__main__":
    quiet_libraries()
    main(Path(sys.argv[1]), int(sys.argv[2]))
