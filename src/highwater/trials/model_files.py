"""The files of a model that trials on other machines need: sent where they are small, else looked
for at the same path there.
"""

from pathlib import Path

from highwater.nouns.codec import Record
from highwater.units import MIB

_MOST_SENT_BYTES = 32 * MIB
"""A configuration with its tokenizer is less, weights are more."""


class ModelFiles(Record, frozen=True, kw_only=True):
    """The files of one model's directory."""

    directory: str
    sizes: dict[str, int]
    """Bytes of each file, by its name."""
    contents: dict[str, bytes] | None = None
    """What is in the files; None where they are too large to be sent."""

    def missing(self) -> str | None:
        """Why this machine does not have the model; None where it does, or is sent it."""
        if self.contents is not None:
            return None
        folder = Path(self.directory)
        for name, size in self.sizes.items():
            path = folder / name
            if not path.is_file():
                return f"it has no {path}"
            if path.stat().st_size != size:
                return f"its {path} is another file"
        return None

    def placed(self, folder: Path) -> Path:
        """The directory to open the model from: its own, or ``folder`` with what was sent."""
        if self.contents is None:
            return Path(self.directory)
        folder.mkdir(parents=True)
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)
        return folder

    @property
    def way(self) -> str:
        """How nodes come by the model, in words."""
        if self.contents is None:
            return f"{self.directory} is read on each node, as a path that all share"
        return "the files of the model are sent to the nodes"


def model_files(directory: Path) -> ModelFiles:
    """The files of a model; those in folders below its own are left out."""
    paths = [path for path in sorted(directory.iterdir()) if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in paths}
    contents = None
    if sum(sizes.values()) <= _MOST_SENT_BYTES:
        contents = {path.name: path.read_bytes() for path in paths}
    return ModelFiles(directory=str(directory), sizes=sizes, contents=contents)
