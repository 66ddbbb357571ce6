"""Groups of processes that meet by gloo, and whether what they found is close enough."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from highwater.nouns.environment import STORE_VARIABLE
from torch_server import SERVER

TIMEOUT_S = 500
_LOOKED_AT_S = 0.01
_PRINTED = 4000


class RankGroups:
    """Runs scripts in groups of processes that need not import PyTorch anew."""

    def __init__(self, folder: Path) -> None:
        """``folder``: where the ranks meet, and what they print."""
        self.folder = folder
        self._groups = 0
        self._models: dict[Callable[[Path], None], Path] = {}

    def models(self, save_models: Callable[[Path], None]) -> Path:
        """The folder that a module of cases has filled, once for all tests."""
        if save_models not in self._models:
            self._models[save_models] = self.folder / f"models-{len(self._models)}"
            save_models(self._models[save_models])
        return self._models[save_models]

    def run(
        self, script: str, processes: int, *words: str | Path, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Run a script of this folder to its end; fails with the end of what was printed."""
        self._groups += 1
        log = self.folder / f"{self._groups}.log"
        environments = [
            {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                STORE_VARIABLE: str(self.folder / f"{self._groups}.store"),
            }
            for rank in range(processes)
        ]
        path = str(Path(__file__).with_name(script))
        with log.open("wb") as said:
            streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            ranks = [
                SERVER.popen(path, *map(str, words), env=environment, **streams)
                for environment in environments
            ]
        is_over = _end(ranks, timeout_s)
        statuses, printed = [rank.returncode for rank in ranks], log.read_text()[-_PRINTED:]
        assert is_over, f"not done after {timeout_s:.0f} s: {printed}"
        assert set(statuses) == {0}, f"{statuses}: {printed}"

    def results(
        self, module: str, processes: int, *words: str | Path, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """What ``results`` of a module of this folder gives rank 0."""
        result = self.folder / f"{self._groups + 1}.json"
        self.run("rank_main.py", processes, result, module, *words, timeout_s=timeout_s)
        return json.loads(result.read_text())


def _end(ranks: Sequence["subprocess.Popen[Any]"], timeout_s: float) -> bool:
    """Wait for the end of all, and whether it came in time."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOKED_AT_S)
        return True
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def assert_close(
    results: dict[str, dict[str, Any]],
    tolerances: dict[str, float],
    of: tuple[str, ...] | None = ("loss", "norm", "gradient"),
) -> None:
    """Every result is within the tolerance that goes with its name."""
    assert results.keys() == tolerances.keys()
    wrong = {
        name: found
        for name, found in results.items()
        if "error" in found or not all(abs(found[what]) <= tolerances[name] for what in of or found)
    }
    assert not wrong, f"{len(wrong)} of {len(results)}: {json.dumps(wrong, indent=1)}"
