"""Runs ``highwater`` in processes that are forked from this one, which has imported it: a command
as installed costs a third of a second of imports, and the tests start more than a thousand.

Started by ``conftest.py``. Each line of stdin is a command as JSON: its program, words, working
directory, environment, and the files or the terminal that are its streams; each line of stdout is
the exit status, as ``wait`` has it.
"""

import json
import os
import sys
import traceback
from typing import Any

from highwater.cli import (
    app,
    commands,
    doctor,
    emit,
    guide,
    predict,
    recommend,
    report,
    search_context_length_capacity,
)

PROGRAMS = {
    "highwater": app.main,
    "search_context_length_capacity": search_context_length_capacity.main,
}
COMMANDS = (commands, doctor, emit, guide, predict, recommend, report)
"""Imported here, so that no child has to."""
_WRITTEN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def serve() -> None:
    """Run one command after the other until stdin ends."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


def _become(command: dict[str, Any]) -> None:
    """Be the command: its streams, directory, environment and words; never returns."""
    status = 1
    try:
        os.chdir(command["cwd"])
        os.environ.clear()
        os.environ.update(command["environment"])
        for descriptor, path in enumerate(command["streams"]):
            opened = os.open(path, _WRITTEN if descriptor else os.O_RDONLY, 0o600)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 -- as an interpreter opens them
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.argv = [command["program"], *command["words"]]
        status = PROGRAMS[command["program"]]()
        sys.stdout.flush()
    except SystemExit as leaving:
        sys.stdout.flush()
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 -- the edge of the process, as an interpreter has it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status & 0xFF)


if __name__ == "__main__":
    serve()
