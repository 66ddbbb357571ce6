"""Whatever ends a run while it saves, the checkpoint before it is whole."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")

from processes import wait_until

from highwater.engine.data.store import check_files, read_manifest
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.run_checkpoints import RunCheckpoints
from highwater.units import parse_bytes
from run_folders import are_equal, numbers_of, state, step_of, training

pytestmark = pytest.mark.timeout(300)

SCRIPT = str(Path(__file__).with_name("saving_run.py"))
KILLS = 4
SPREAD_S = 0.2
"""Longer than a step and a save: a kill is anywhere in them."""


def test_a_run_killed_with_9_anywhere_goes_on_as_if_it_never_was(mark, tmp_path, record_property):
    moments = random.Random(0)
    folder, saved, partial = tmp_path / "run", 0, 0
    (folder / "checkpoints").mkdir(parents=True)
    forks = subprocess.Popen(
        [sys.executable, SCRIPT, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert forks.stdin is not None
    assert forks.stdout is not None
    for _ in range(KILLS):
        before = saved
        forks.stdin.write("\n")
        forks.stdin.flush()
        run = int(forks.stdout.readline())

        def has_saved_more(before: int = before) -> bool:
            return latest_of(folder) > before

        assert wait_until(has_saved_more, within_s=120)
        time.sleep(moments.uniform(0, SPREAD_S))  # where it is killed is what is drawn
        os.kill(run, signal.SIGKILL)
        assert wait_until(lambda run=run: not Path(f"/proc/{run}").exists(), within_s=60)
        saved = latest_of(folder)
        partial += any((folder / "checkpoints").glob("*.partial"))
        path = folder / "checkpoints" / f"step-{saved:06}"
        manifest = read_manifest(path)
        check_files(path, manifest, manifest.files)
    forks.communicate()
    record_property("counted", f"{partial} of {KILLS} kills left a folder half written")
    with process_mesh.alone(torch.device("cpu")):
        own, never_killed = (training(tmp_path / name) for name in ("own", "never"))
        assert RunCheckpoints(folder).resume(own) == state(saved, evaluation_loss=None)
        for step in range(1, saved + 1):
            step_of(never_killed, step)
        assert are_equal(numbers_of(own), numbers_of(never_killed))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{saved:06}"]


def latest_of(folder: Path) -> int:
    """The step of the latest checkpoint, whatever is renamed while this looks."""
    return max((int(path.name[5:]) for path in folder.glob("checkpoints/step-*[0-9]")), default=0)


REFUSED_FIRST, FULL_IN_THE_MIDDLE = -4096, 16384
"""Bytes that are free besides what a checkpoint's numbers take: what its files say of these takes
more than the second."""


def test_a_full_disk_is_said_and_the_checkpoint_before_is_whole(small_disk, tmp_path):
    disk = small_disk(24)
    spares = (str(REFUSED_FIRST), str(FULL_IN_THE_MIDDLE))
    done = disk.run(sys.executable, SCRIPT, "disk", *spares)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    free: list[int] = []
    for kind, problem, hint, names in said:
        assert kind == "MachineError"
        assert problem.startswith("step-000003 cannot be saved in disk/checkpoints: there is no")
        assert problem.endswith("step-000002 is still there")
        assert "`df -h disk`" in hint
        assert names == ["step-000002"], "nothing is left of the one that failed"
        takes, is_free = map(parse_bytes, re.findall(r"[\d.]+ [KM]iB", problem))
        free.append(takes - is_free)
    first, middle = free
    assert first < takes / 10, "it was refused before it began"
    assert middle > takes / 2, "it was refused by the disk, with the most of it written"
    run = tmp_path / "again"
    shutil.copytree(disk.folder / "checkpoints", run / "checkpoints")
    with process_mesh.alone(torch.device("cpu")):
        own = training(tmp_path / "own")
        assert RunCheckpoints(run).resume(own) == state(2, evaluation_loss=None)
