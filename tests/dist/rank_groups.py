"""Groups of processes that meet by gloo, and whether what they found is close enough."""

import json
import os
from pathlib import Path
from typing import Any

from fork_server import ForkServer
from highwater.nouns.environment import STORE_VARIABLE

IMPORTED = (
    *("safetensors.torch", "transformers.models.auto.modeling_auto", "transformers.trainer"),
    *("highwater.engine.models.build", "highwater.engine.tracer.trinity_step"),
    *("highwater.engine.training.checkpoint", "highwater.engine.training.rank_run"),
)
"""What the scripts import: none of their processes has to."""
TIMEOUT_S = 500
"""Of one group, on a machine that is busy."""
_PRINTED = 4000
"""Characters, of what is shown of what it printed."""


class RankGroups:
    """Runs scripts in groups of processes, forked from one that has imported what they do."""

    def __init__(self, folder: Path) -> None:
        """``folder``: where the ranks meet, and what they print."""
        self._folder = folder
        self._groups = 0
        self._server = ForkServer(*IMPORTED, environment={"OMP_NUM_THREADS": "1"})

    def run(
        self, script: str, processes: int, *words: str | Path, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Run a script of this folder to its end; fails with the end of what was printed."""
        self._groups += 1
        log = self._folder / f"{self._groups}.log"
        environments = [
            {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                STORE_VARIABLE: str(self._folder / f"{self._groups}.store"),
            }
            for rank in range(processes)
        ]
        path = str(Path(__file__).with_name(script))
        streams = (os.devnull, str(log), str(log))
        self._server.start(path, [str(word) for word in words], environments, streams=streams)
        if not self._server.is_over(timeout_s):
            self.end()
            raise TimeoutError(f"not done after {timeout_s:.0f} s: {log.read_text()[-_PRINTED:]}")
        statuses = self._server.statuses()
        assert set(statuses) == {0}, f"{statuses}: {log.read_text()[-_PRINTED:]}"

    def results(
        self, module: str, processes: int, *words: str | Path, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """What ``results`` of a module of this folder gives rank 0."""
        result = self._folder / f"{self._groups + 1}.json"
        self.run("rank_main.py", processes, result, module, *words, timeout_s=timeout_s)
        return json.loads(result.read_text())

    def end(self) -> None:
        """End what forks them, and every rank that still runs."""
        self._server.end()


def assert_close(
    results: dict[str, dict[str, Any]],
    tolerances: dict[str, float],
    of: tuple[str, ...] | None = ("loss", "norm", "gradient"),
) -> None:
    """Every result is within the tolerance that goes with its name; an error is not, nor what is
    not a number. ``tolerances`` has every result's name; ``of`` None: all its numbers.
    """
    assert results.keys() == tolerances.keys()
    wrong = {
        name: found
        for name, found in results.items()
        if "error" in found or not all(abs(found[what]) <= tolerances[name] for what in of or found)
    }
    assert not wrong, f"{len(wrong)} of {len(results)}: {json.dumps(wrong, indent=1)}"
