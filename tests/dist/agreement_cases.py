"""One process of a group: values that ranks agree on. Started by ``rank_groups.py``."""

import os
import pickle
from typing import Any

import torch
import torch.distributed as dist

from highwater.engine.data.store import FileRecord
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.mesh import every_ranks
from highwater.engine.training.rank_context import agreed, gathered
from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.layout import Layout


class Touch:
    """Whose pickle makes a file when it is read."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


def results(mark: str) -> dict[str, Any]:
    mesh = process_mesh.shard_mesh(Layout(gpus=2), torch.device("cpu"))
    is_first = dist.get_rank() == 0
    found: dict[str, Any] = {}
    for name, sent in {
        "pickle": pickle.dumps(Touch(mark)),
        "old pickle": pickle.dumps(Touch(mark), protocol=0),
        "half": b'["a", "b',
        "no text": b"\xff\xfe\x00",
        "another kind": b'{"a": 1}',
        "nothing": b"",
    }.items():
        if not is_first:
            every_ranks(list(sent), torch.uint8, mesh)
            continue
        try:
            found[name] = ["taken", gathered(["a"], mesh, kind=list[str])]
        except HighwaterError as error:
            found[name] = [type(error).__name__, error.problem, error.hint]
    record = FileRecord(size_bytes=1 << 40, sha256="0" * 64)
    own = {"first": {"é 1": record}, "second": {}}["first" if is_first else "second"]
    found["records"] = gathered(own, mesh, kind=dict[str, FileRecord]) == [{"é 1": record}, {}]
    for name, error in {
        "usage": UsageError("no room for '\udcff'", hint="`ls`"),
        "machine": MachineError("the disk is full", hint="`df -h`"),
        "bug": KeyError("gone"),
        "nobody": None,
    }.items():
        try:
            with agreed(mesh):
                if not is_first and error is not None:
                    raise error
            found[name] = "agreed"
        except Exception as told:  # noqa: BLE001 -- that is what is looked at
            found[name] = [
                type(told).__name__,
                getattr(told, "problem", str(told)),
                getattr(told, "hint", None),
            ]
    return found
