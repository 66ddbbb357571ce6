"""The Python that another trainer runs in, asked from outside: which packages it has."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from highwater.nouns.files import open_regular
from highwater.trials.trial_environment import clean_environment

_ASK = (
    "import json, sys; from importlib.metadata import version, PackageNotFoundError as Missing\n"
    "def of(name):\n"
    "    try: return version(name)\n"
    "    except Missing: return None\n"
    "print(json.dumps({name: of(name) for name in sys.argv[1:]}))"
)
_ASK_S = 60.0
"""Seconds that the answer may take: nothing is imported, but a disk may be far away."""
_SHEBANG_BYTES = 256


def python_of(program: str) -> Path | None:
    """The interpreter in the first line of a program that pip installed; None of any other, and
    where there is no such program.
    """
    found = shutil.which(program)
    if found is None:
        return None
    with open_regular(Path(found)) as file:
        first = file.read(_SHEBANG_BYTES).partition(b"\n")[0].decode(errors="replace")
    python = Path(first.removeprefix("#!").strip())
    return python if first.startswith("#!/") and "python" in python.name else None


@cache
def versions_there(python: Path, packages: tuple[str, ...]) -> Mapping[str, str]:
    """The versions of these packages as an interpreter finds them; those it has not are left out,
    all of them where it does not answer.
    """
    command: Sequence[str] = [str(python), "-P", "-c", _ASK, *packages]
    try:
        done = subprocess.run(
            command,
            env=clean_environment("native"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_S,
            check=True,
        )
        answer: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {name: version for name, version in answer.items() if version is not None}
