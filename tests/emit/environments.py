"""The environments of other trainers, which ``make test-emit`` installs."""

from pathlib import Path


def program_of(trainer: str, program: str = "python") -> Path:
    path = Path(__file__).parents[2] / f".venv-emit-{trainer}" / "bin" / program
    assert path.exists(), f"{path} is missing: `make test-emit` installs it"
    return path
