"""Groups of processes that meet by gloo, forked from one that has imported torch."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT_S = 500
"""Of one group, on a machine that is busy."""
_PRINTED = 4000
"""Characters, of what is shown of what it printed."""


class RankGroups:
    """Runs scripts in groups of processes; what forks them is started by the first that is wanted,
    and serves all tests of this process.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: where the ranks meet, and what they print."""
        self._folder = folder
        self._groups = 0
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, script: str, processes: int, *words: str | Path, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Run a script of this folder to its end; fails with the end of what was printed."""
        if self._server is None:
            self._server = _started()
        self._groups += 1
        log = self._folder / f"{self._groups}.log"
        group = {
            "script": str(Path(__file__).with_name(script)),
            "processes": processes,
            "words": [str(word) for word in words],
            "store": str(self._folder / f"{self._groups}.store"),
            "log": str(log),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{json.dumps(group)}\n")
        self._server.stdin.flush()
        if not select.select([self._server.stdout], [], [], timeout_s)[0]:
            self.end()
            raise TimeoutError(f"not done after {timeout_s:.0f} s: {log.read_text()[-_PRINTED:]}")
        statuses = json.loads(self._server.stdout.readline())
        assert set(statuses.values()) == {0}, f"{statuses}: {log.read_text()[-_PRINTED:]}"

    def results(
        self, script: str, processes: int, *words: str | Path, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        """What rank 0 writes to the file that is the script's first word."""
        result = self._folder / f"{self._groups + 1}.json"
        self.run(script, processes, result, *words, timeout_s=timeout_s)
        return json.loads(result.read_text())

    def end(self) -> None:
        """End what forks them, and every rank that still runs."""
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None


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


def _started() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("rank_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
