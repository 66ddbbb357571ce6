"""Ranks across machines. The user's launcher, for instance ``srun``, starts ``python -m
highwater.trials.nodes FOLDER VERSION`` on each, which becomes the reaper of that machine's ranks.

The order and all reports are in a folder that every machine shares. The ranks' process group is set
up through a file beside it, or through the port that the launcher names.
"""

import os
import shlex
import shutil
import socket
import stat
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NoReturn

import msgspec

from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.model.model import load_model
from highwater.nouns.codec import Record, from_json, to_json, write_whole
from highwater.nouns.request import Request
from highwater.nouns.trial import REFUSED_FILE, Refused, TrialSpec
from highwater.trials.probe import probe
from highwater.trials.ranks import RankShare
from highwater.trials.reaper import module, under_reaper
from highwater.trials.trial_process import await_release, private_folder, trial_environment
from highwater.version import __version__

_LAUNCHERS = (
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # mpiexec of MPICH and Intel MPI
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
    ("SLURM_NODEID", "SLURM_NNODES"),
)
"""Variables by which launchers number a process and count all of them; innermost launcher first."""
_MEETING = (
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
)
"""Variables by which launchers name the port where ranks meet. Source: torch's rendezvous.py."""
_ORDER = "node.json"


class NodeOrder(Record, frozen=True, kw_only=True):
    """Order to each machine of a trial: its ranks' command, and the GPUs and model they need."""

    trial: TrialSpec
    worker: tuple[str, ...]
    """The command that starts one rank."""
    store: str | None
    """The file through which all ranks meet; None: they meet at the launcher's port."""
    grace_s: float | None
    """Seconds that ranks have to save after they are told to end; None: none."""
    allow_busy: bool
    device_name: str
    """Name of the asking machine's GPUs by their driver, or ``CPU``."""
    config_digest: str
    """Digest of the model's configuration on the asking machine."""


class Across(Record, frozen=True, kw_only=True):
    """How one trial's ranks are started on several machines, and through what they connect."""

    launcher: tuple[str, ...]
    nodes: int
    rendezvous: Path | None
    """A file in whose folder each start makes a folder of its own; None: the launcher's port."""
    shared: Path
    """A folder that every machine sees."""
    allow_busy: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """A warning if ranks connect through an open port; empty otherwise."""
        if self.rendezvous is not None:
            return ()
        return (
            "a port is open: the ranks meet at the MASTER_ADDR that the launcher sets, and whoever "
            "reaches it can join them; `--rendezvous FILE` opens none",
        )

    @contextmanager
    def folder(self) -> Generator[Path]:
        """Context manager: the folder of one start, shared by all machines, for this user only."""
        if self.rendezvous is not None:
            self.rendezvous.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_shared(self.rendezvous.parent, self.shared)
        with private_folder(
            self.shared if self.rendezvous is None else self.rendezvous.parent
        ) as own:
            yield own

    def command(
        self, trial: TrialSpec, worker: list[str], folder: Path, *, grace_s: float | None
    ) -> list[str]:
        """Write the order into ``folder`` and return the command that starts all ranks."""
        order = NodeOrder(
            trial=trial,
            worker=tuple(worker),
            store=None if self.rendezvous is None else str(folder / self.rendezvous.name),
            grace_s=grace_s,
            allow_busy=self.allow_busy,
            device_name=_device_name(trial),
            config_digest=load_model(trial.model_directory).config_digest,
        )
        (folder / _ORDER).write_text(to_json(order), encoding="utf-8")
        return [*self.launcher, *module("highwater.trials.nodes", str(folder), __version__)]

    def environment(self) -> dict[str, str]:
        """The user's environment without variables that an outer launcher set for this process."""
        outer = {*_MEETING, *(rank for rank, _ in _LAUNCHERS)}
        return {name: value for name, value in os.environ.items() if name not in outer}


def across_nodes(request: Request) -> Across | None:
    """How a request's ranks are started on several machines; None for this machine alone. Raises
    UsageError without a usable launcher, or if others can access the rendezvous folder.
    """
    example = f"srun --nodes {max(2, request.nodes)} --ntasks-per-node 1 --kill-on-bad-exit"
    if request.nodes == 1:
        if request.launcher is not None or request.rendezvous is not None:
            name = "launcher" if request.launcher is not None else "rendezvous"
            raise UsageError(
                f"`--{name}` is of several machines, and one is named",
                hint=f"add `--nodes 2`, or leave `--{name}` out",
            )
        return None
    hint = f"use `--launcher {shlex.quote(example)}`: it starts one process on each machine"
    if request.launcher is None:
        raise UsageError(f"nobody starts the ranks on {request.nodes} machines", hint=hint)
    try:
        words = tuple(shlex.split(request.launcher))
    except ValueError as error:
        raise UsageError(
            f"the launcher {request.launcher!r} is no command: {error}", hint=hint
        ) from error
    if not words or shutil.which(words[0]) is None:
        problem = f"the launcher's program {words[0] if words else ''!r} is not to be found"
        raise UsageError(problem, hint=hint)
    shared = Path(request.log_dir).absolute()
    rendezvous = None if request.rendezvous is None else Path(request.rendezvous).absolute()
    if rendezvous is not None:
        _refuse_shared(rendezvous.parent, shared)
    return Across(
        launcher=words,
        nodes=request.nodes,
        rendezvous=rendezvous,
        shared=shared,
        allow_busy=request.allow_busy,
    )


def _refuse_shared(folder: Path, beside: Path) -> None:
    """Raise UsageError if others can access the rendezvous ``folder``: they could join."""
    problem = _not_private(folder)
    if problem is not None:
        names = (beside / f"rendezvous-{number}" for number in count(1))
        other = next(name for name in names if _not_private(name) is None)
        raise UsageError(
            f"the ranks would meet in {folder}, which {problem}",
            hint=f"use `--rendezvous {shlex.quote(f'{other}/ranks')}`: the folder is made for you "
            "alone",
        )


def _not_private(folder: Path) -> str | None:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return "is a link" if stat.S_ISLNK(found.st_mode) else "is no folder"
    if found.st_uid != os.getuid():
        return "is another user's"
    return "others can read or write" if found.st_mode & 0o077 else None


def _device_name(trial: TrialSpec) -> str:
    machine = probe()
    return machine.gpus[0].name if trial.device == "cuda" and machine.gpus else "CPU"


def main() -> NoReturn:
    """Run the reaper of this machine's ranks in this process, or write a file with the refusal."""
    parent, folder, version = os.getppid(), Path(sys.argv[1]), sys.argv[2]
    try:
        command, environment = _reaper_command(folder, version, parent)
    except HighwaterError as error:
        refused = Refused(
            problem=f"{socket.gethostname()}: {error.problem}", hint=error.hint, is_machine=True
        )
        with suppress(FileNotFoundError):  # another machine's word took its place
            write_whole(folder / REFUSED_FILE, msgspec.json.encode(refused))
        sys.exit(f"error: {refused.problem}")
    os.execve(command[0], command, environment)  # noqa: S606 -- words, and no shell


def _reaper_command(folder: Path, version: str, parent: int) -> tuple[list[str], dict[str, str]]:
    """The command and environment of this machine's reaper; raises if the machine is unfit."""
    if version != __version__:
        raise _unlike("highwater", __version__, version)
    order = from_json((folder / _ORDER).read_bytes(), NodeOrder)
    trial, gpus = order.trial, order.trial.layout.machine_gpus
    node = _number(trial.layout.gpus // gpus, os.environ)
    own = folder / str(node)
    try:
        own.mkdir()
    except FileExistsError as error:
        raise _bad_launcher(f"two processes are told that they are number {node}") from error
    if trial.device == "cuda":
        if (there := len(probe().gpus)) < gpus:
            raise MachineError(
                f"{gpus} GPUs are asked for, and {there} are present",
                hint="`highwater doctor` there shows more",
            )
        if not order.allow_busy:
            await_release(None, gpus)
    digest = load_model(trial.model_directory).config_digest
    for what, mine, theirs in (
        ("device", _device_name(trial), order.device_name),
        ("model configuration", digest, order.config_digest),
    ):
        if mine != theirs:
            raise _unlike(what, mine, theirs)
    environment = trial_environment(trial)
    if order.store is None:
        environment |= _port(os.environ)
        if node == 0:
            sys.stdout.write(
                f"a port is open at {environment['MASTER_ADDR']}: the ranks meet there\n"
            )
            sys.stdout.flush()
    share = RankShare(
        count=gpus,
        folder=str(own),
        first=node * gpus,
        world=trial.layout.gpus,
        store=order.store,
        is_at_port=order.store is None,
    )
    command = under_reaper(order.worker, ranks=share, grace_s=order.grace_s, parent=parent)
    return command, environment


def _unlike(what: str, mine: str, theirs: str) -> MachineError:
    return MachineError(
        f"it has the {what} {mine}, and the machine that asks has {theirs}",
        hint="use machines that are alike; `highwater doctor` shows each",
    )


def _number(nodes: int, environment: Mapping[str, str]) -> int:
    """Number of this machine, from 0, by its launcher's variables."""
    for rank, size in _LAUNCHERS:
        number, processes = environment.get(rank, ""), environment.get(size, "")
        if not (number.isdecimal() and processes.isdecimal()):
            continue
        if int(processes) != nodes or int(number) >= nodes:
            raise _bad_launcher(
                f"the launcher started process {number} of {processes} ({rank}, {size}), and "
                f"{nodes} machines are asked for"
            )
        return int(number)
    names = ", ".join(rank for rank, _ in _LAUNCHERS)
    raise _bad_launcher(f"the launcher says in none of {names} which machine this is")


def _bad_launcher(problem: str) -> UsageError:
    return UsageError(
        problem,
        hint="have the launcher start one process on each machine, as `srun` does with "
        "`--ntasks-per-node 1`",
    )


def _port(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables for the process group's port. Raises UsageError without them."""
    named = {name: environment[name] for name in _MEETING if name in environment}
    if not {"MASTER_ADDR", "MASTER_PORT"} <= named.keys():
        raise UsageError(
            "nobody says where the ranks meet: the launcher sets no MASTER_ADDR and MASTER_PORT",
            hint="use `--rendezvous FILE`: a file that every machine sees",
        )
    return named


if __name__ == "__main__":
    main()
