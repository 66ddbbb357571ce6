"""A process that trains a tiny model and saves after every step.

``saving_run.py FOLDER`` does so without end in a child, forked anew for each line of its stdin;
each line of its stdout is the child's process id. ``saving_run.py FOLDER SPARE...`` saves two
steps, and tries to save a third on a disk that it fills but for what a checkpoint's numbers take
and so many bytes, once for each; it writes what is said, a JSON list a line.
"""

import json
import os
import shutil
import sys
from itertools import count
from pathlib import Path

import torch

from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.run_checkpoints import RunCheckpoints, checkpoint_bytes
from highwater.errors import HighwaterError
from run_folders import state, step_of, training


def main() -> None:
    folder, spares = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    torch.set_num_threads(1)
    if spares:
        with process_mesh.alone(torch.device("cpu")):
            save_on_a_full_disk(folder, spares)
        return
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            with process_mesh.alone(torch.device("cpu")):
                save_without_end(folder)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        os.waitpid(child, 0)


def save_without_end(folder: Path) -> None:
    """From where the run is."""
    own, of_run = training(folder / "model"), RunCheckpoints(folder)
    found = of_run.resume(own)
    for step in count(1 if found is None else found.step + 1):
        step_of(own, step)
        of_run.save(own, state(step, evaluation_loss=None))


def save_on_a_full_disk(folder: Path, spares: list[int]) -> None:
    own, of_run, filler = training(folder / "model"), RunCheckpoints(folder), folder / "filler"
    for step in (1, 2):
        step_of(own, step)
        of_run.save(own, state(step, evaluation_loss=None))
    for spare in spares:
        left = checkpoint_bytes(own) + spare
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - left)
        try:
            of_run.save(own, state(3, evaluation_loss=None))
        except HighwaterError as error:
            said = [type(error).__name__, error.problem, error.hint]
            names = sorted(path.name for path in of_run.folder.iterdir())
            sys.stdout.write(f"{json.dumps([*said, names])}\n")
        filler.unlink()


if __name__ == "__main__":
    main()
