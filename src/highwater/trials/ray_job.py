"""A job on a Ray cluster: a process, the only one that imports Ray, which reads the nodes, or holds
one trial on a node, and what runs there in a process that Ray starts.

Whatever Ray prints, its signals and its crashes stay in that process, which ``trials/job.py``
starts, awaits and ends as any other. When it ends, even by kill -9, Ray ends what was started for
it on any node. Ray brings this package to the nodes.

Run as ``python -P -m highwater.trials.ray_runner ORDER REPORT``.
"""

import logging
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePath
from threading import Event, Thread
from typing import Any, NamedTuple

from highwater.errors import HighwaterError, MachineError
from highwater.nouns.codec import Record, open_regular, read_file
from highwater.nouns.environment import allocator_environment
from highwater.nouns.hardware import Machine, refuse_unfit_gpu
from highwater.nouns.request import Request
from highwater.nouns.trial import (
    Device,
    Launch,
    Launcher,
    Outcome,
    Refused,
    TrialEndedError,
    TrialResult,
    refused,
    serve,
    tell_phase,
)
from highwater.trials.inputs import ModelFiles
from highwater.trials.probe import (
    OLDEST,
    package_obstacles,
    probe,
    refuse_torch_without_gpu,
    versions_of,
)
from highwater.trials.trial_process import log_path_of, private_folder
from highwater.units import MIB

LAUNCHED_BY = "highwater.trials.foreign_trial:launcher_in"
AUTO = "auto"
"""The address by which Ray looks itself: ``RAY_ADDRESS``, else the cluster of this machine."""
START = "`ray start --head` starts one on this machine"
STATUS = "`ray status` shows the cluster"
READ_S = 120.0
"""Bound on the time until a node was read: Ray brings the package there, and torch is asked."""
END_S = 40.0
"""Bound on the time until a trial that is told to end has: the reaper has 30 s."""
WAITS = "waiting for its place on a node"
_SHOWN = 8
"""Digits of a node's id that are shown."""
_ASKED_S = 0.5
"""Seconds between two questions to a trial."""
_FIRST_CHOICE_S = 5.0
"""Seconds that a trial waits for the node that suits best; then any will do."""
_ANSWER_S = 10.0
"""Bound on the time of one answer; a busy node is asked again."""
_FORGOTTEN_S = 120.0
"""Seconds without a question after which a trial ends; a node that does not answer for half as long
is taken for lost. Ray itself takes about 20 by its defaults: five health checks, 3 s apart."""
_WATCHED_S = 1.0
_GONE_S = 5.0
"""Bound on the time until Ray has ended the process that held a trial on its node."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MEMORY_MONITOR = "RAY_memory_usage_threshold"
"""A variable that Ray names where it ended a process because its node's memory was full."""
_MOST_FILE_BYTES = 256 * MIB
"""Bytes of a file beside a trial's log at the most; a larger one goes with its folder."""
_CHUNK_BYTES = 4 * MIB


class Needs(Record, frozen=True, kw_only=True):
    """Needs of the trials of a search on each node."""

    on_gpus: bool
    model: ModelFiles
    data_module: str | None = None
    """The user's module that yields batches, if any."""
    is_engine: bool = True
    """True if this package's engine trains, not another trainer."""
    program: str | None = None
    """The program of another trainer's command, if one is named."""


class Node(Record, frozen=True, kw_only=True):
    """One node of a cluster: what Ray hands out of it, and what is there."""

    node_id: str
    cpus: float
    gpus: int
    memory_bytes: int
    """Host memory that Ray hands out; it keeps some for its object store."""
    machine: Machine | None = None
    """The machine as a process there read it, as far as Ray hands it out. None: it could not."""
    problem: str | None = None
    """Why no trial can run on it; None where one can."""

    @property
    def name(self) -> str:
        """Its name in a message; Ray's own commands show the same digits first."""
        return _name(self.node_id)

    @property
    def read(self) -> Machine:
        """The machine, of a node without a problem."""
        assert self.machine is not None  # noqa: S101
        return self.machine

    def lack(self, device: Device) -> str | None:
        """Why no trial on such a device can run on it; None where one can."""
        if self.problem is not None or (self.gpus if device == "cuda" else self.cpus):
            return self.problem
        return "it has no GPU" if device == "cuda" else "Ray hands out no CPU there"

    def kind(self, device: Device) -> tuple[str, str]:
        """Values alike on every node of a study: the GPUs' name, and the version of torch."""
        name = "" if device == "cpu" else self.read.gpus[0].name
        return name, self.read.versions.get("torch", "")


def _name(node_id: str) -> str:
    return f"node {node_id[:_SHOWN]}"


class Demand(Record, frozen=True, kw_only=True):
    """The part of one node that a trial takes."""

    gpus: int
    cpus: float
    memory_bytes: int
    whole_node: bool
    """True if nothing else of ours runs beside it: on the CPU, and with states in host memory."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources to ask Ray for, by its names."""
        asked = {"GPU": self.gpus, "CPU": self.cpus, "memory": self.memory_bytes}
        return {name: value for name, value in asked.items() if value}


class Wanted(Record, frozen=True, kw_only=True):
    """Resources asked of Ray, and on which nodes."""

    demand: Demand
    first: str
    """The node on which the trial leaves the others the most room."""
    any_of: tuple[str, ...]
    """The nodes that will do where others use the first one."""


class NodeTrial(Record, frozen=True, kw_only=True):
    """A trial that is to run on a node."""

    launch: Launch
    request: Request
    """The request that its launcher is made of."""
    launched_by: str
    """Module and function that make the launcher of a request."""
    log_path: str
    """An empty log on this machine, to which the trial's own is added."""
    wanted: Wanted


class RayOrder(Record, frozen=True, kw_only=True):
    """The order to a cluster: to run a trial, or without one to tell its nodes."""

    address: str
    needs: Needs
    trial: NodeTrial | None = None


class RayReport(Record, frozen=True, kw_only=True):
    """The report on an order."""

    nodes: tuple[Node, ...] = ()
    """The nodes that are alive."""
    result: TrialResult | None = None
    error: str | None = None
    """The text of an error of ours, on the node."""
    lost_on: str | None = None
    """The node on which the trial was lost, if it was."""
    has_lost_node: bool = False
    """True if that node is gone."""


def main() -> None:
    """Be the process of a job."""
    with suppress(TrialEndedError):
        serve(RayOrder, _work)
    sys.stderr.flush()
    os._exit(0)  # Ray ends what was started for this process, and takes seconds to leave


def _work(order: RayOrder, folder: Path) -> RayReport:
    _join(order.address)
    if order.trial is None:
        return RayReport(nodes=tuple(_nodes(order.needs)))
    return _held(order.trial, order.needs.model, folder)


def _join(address: str) -> None:
    """Join a cluster; none is ever started."""
    import ray

    package = str(Path(__file__).resolve().parents[1])
    environment = {"py_modules": [package], "excludes": ["**/__pycache__"]}
    try:
        ray.init(
            address=address,
            runtime_env=environment,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray has no common one for this
        where = "" if address == AUTO else f" at {address}"
        raise MachineError(
            f"no Ray cluster could be joined{where}: {_first_line(error)}",
            hint=f"{START}; `--address HOST:6379` joins another's, from one of its machines",
        ) from error


def _nodes(needs: Needs) -> Iterator[Node]:
    """The nodes that are alive, each as a process on it reads it, all at once."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import ray

    alive = [each for each in ray.nodes() if each["Alive"]]
    reading: list[Any] = []
    for each in alive:
        there = NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)
        read = ray.remote(read_node).options(num_cpus=0, scheduling_strategy=there, max_retries=1)
        reading.append(read.remote(int(each["Resources"].get("GPU", 0)), needs))
    deadline = time.monotonic() + READ_S
    for each, ref in zip(alive, reading, strict=True):
        resources, machine = each["Resources"], None
        try:
            machine, problem = ray.get(ref, timeout=max(1.0, deadline - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - what a process far away could not even import
            problem = f"it cannot be read: {_first_line(error)}"
        memory_bytes = int(resources.get("memory", 0))
        if machine is not None:  # what is planned by it has to fit into what Ray hands out
            machine = machine.with_memory(memory_bytes)
        yield Node(
            node_id=each["NodeID"],
            cpus=resources.get("CPU", 0.0),
            gpus=int(resources.get("GPU", 0)),
            memory_bytes=memory_bytes,
            machine=machine,
            problem=problem,
        )


def _held(trial: NodeTrial, model: ModelFiles, folder: Path) -> RayReport:
    """Hold a trial from its place on a node to its end there; SIGTERM ends it."""
    from ray.exceptions import RayError
    from ray.util import placement_group_table

    ended, began, node_id, log_path = Event(), time.monotonic(), None, Path(trial.log_path)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # only now: Ray has taken it in ``init``
    try:
        group = _place(trial.wanted, ended)
        node_id = str(placement_group_table(group)["bundles_to_node_id"][0])
        end = _run_on(group, trial, model, folder, ended)
        if isinstance(end.left, Refused):
            raise end.left.error()
        if isinstance(end.left, str):
            return RayReport(error=end.left)
        for name, content in end.files:
            path = log_path.parent / f"{log_path.stem}{name}"
            if ".." in PurePath(name).parts:
                raise OSError(f"{name} is no name of a file beside a log")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return RayReport(result=end.left.replace(log_path=trial.log_path))
    except RayError as error:
        name = "every node for it" if node_id is None else _name(node_id)
        is_there = node_id in _alive()
        reason = f"{name} of the Ray cluster was lost"
        if is_there:
            reason = f"Ray lost the trial on {name}: {loss_reason(error)}"
        with log_path.open("ab") as log:
            log.write(f"\n{reason}\n".encode())
        result = TrialResult(
            outcome=Outcome.CRASHED,
            reason=reason,
            attempt=trial.launch.attempt,
            log_path=trial.log_path,
            wall_s=time.monotonic() - began,
        )
        return RayReport(result=result, lost_on=node_id or "", has_lost_node=not is_there)
    except OSError as error:
        raise MachineError(
            f"what the trial says could not be recorded: {error}",
            hint=f"make room and check the rights of {log_path.parent}, or use another `--log-dir`",
        ) from error


def _place(wanted: Wanted, ended: Event) -> Any:
    """Wait for a part of one node. Raises TrialEndedError, and RayError where no node is left."""
    from ray.exceptions import NodeDiedError
    from ray.util import placement_group, remove_placement_group

    def on(*node_ids: str) -> Any:
        chosen = {"ray.io/node-id": f"in({','.join(node_ids)})"}
        return placement_group(
            [wanted.demand.bundle], strategy="STRICT_PACK", bundle_label_selector=[chosen]
        )

    group, until = on(wanted.first), time.monotonic() + _FIRST_CHOICE_S
    while not group.wait(_ASKED_S):
        if ended.is_set():
            raise TrialEndedError
        if not _alive() & {wanted.first, *wanted.any_of}:
            raise NodeDiedError("every node that could hold the trial is gone")
        if time.monotonic() > until:
            remove_placement_group(group)
            group, until = on(*wanted.any_of), float("inf")
    return group


def _run_on(
    group: Any, trial: NodeTrial, model: ModelFiles, folder: Path, ended: Event
) -> "TrialEnd":
    """Run a trial in its place. Raises RayError where it was lost, and TrialEndedError."""
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    import ray

    demand = trial.wanted.demand
    made = ray.remote(TrialOnNode).options(
        num_cpus=demand.cpus,
        num_gpus=demand.gpus,
        memory=demand.memory_bytes or None,
        max_concurrency=4,  # it runs, tells, and is told to end
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        # There before the process starts. Ray would kill the children of a process that it ends
        # with -9, the reaper too, and orphan the trial; the reaper ends all by itself.
        runtime_env={
            "env_vars": {
                **allocator_environment(trial.launch.spec.settings.allocator),
                "RAY_kill_child_processes_on_worker_exit": "0",
            }
        },
    )
    actor: Any = made.remote()
    try:
        actor.run.remote(trial, model)
        return _end_of(actor, Path(trial.log_path), folder, ended)
    finally:
        ray.kill(actor)
        # Ray only passes that on: who is told that the trial ended finds nothing left of it.
        until = time.monotonic() + _GONE_S
        with suppress(RayError):
            while time.monotonic() < until:
                ray.get(actor.end.remote(), timeout=_GONE_S)


def _end_of(actor: Any, log_path: Path, folder: Path, ended: Event) -> "TrialEnd":
    """Pass on what a trial says until it has ended, and end it when told."""
    from ray.exceptions import ActorUnavailableError, GetTimeoutError

    import ray

    known_bytes, heard_at, until = 0, time.monotonic(), float("inf")
    with log_path.open("ab", buffering=0) as log:
        while time.monotonic() < until:
            if ended.is_set() and until == float("inf"):
                until = time.monotonic() + END_S
                actor.end.remote()
            try:
                told: Told = ray.get(actor.tell.remote(known_bytes), timeout=_ANSWER_S)
            except (ActorUnavailableError, GetTimeoutError):
                # It may be back, or Ray finds out that its node is gone.
                if time.monotonic() - heard_at > _FORGOTTEN_S / 2:
                    raise
            else:
                heard_at = time.monotonic()
                known_bytes += len(told.log)
                log.write(told.log)
                tell_phase(folder, told.phase)
                if told.end is not None:
                    return told.end
            ended.wait(_ASKED_S) if until == float("inf") else time.sleep(_ASKED_S)
    raise TrialEndedError


def _alive() -> set[str]:
    """The ids of the nodes that Ray takes for alive."""
    import ray

    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def loss_reason(error: BaseException) -> str:
    """Why a trial was lost, in a line."""
    text = str(error).strip() or repr(error)
    if _MEMORY_MONITOR in text:
        return "the node's memory was full, and Ray's memory monitor ended what ran there"
    # Why an actor died comes after its name and its number.
    return text.splitlines()[-1].partition(" Some common causes")[0]


# The rest runs on a node, in a process that Ray starts there:


class TrialEnd(NamedTuple):
    """The end of a trial on its node."""

    left: TrialResult | Refused | str
    """Its result, what was refused, or the text of an error of ours."""
    files: tuple[tuple[str, bytes], ...] = ()
    """The files beside its log: each by what follows the log's own name, less its suffix."""


class Told(NamedTuple):
    """Words of a trial on itself while it runs."""

    phase: str
    log: bytes
    """Content of its log after what is known of it."""
    end: TrialEnd | None
    """None while it runs."""


def read_node(gpus: int, needs: Needs) -> tuple[Machine, str | None]:
    """Read this node with as many of Ray's GPUs; and why no trial can run there, None: one can."""
    # Ray hides the GPUs of a process that asked for none.
    shown = os.environ.pop(_VISIBLE, None)
    try:
        machine = probe()
        versions = {**machine.versions, **versions_of(OLDEST)}
        machine = machine.replace(gpus=machine.gpus[:gpus], versions=versions)
        return machine, _obstacle(machine, gpus, needs)
    finally:
        if shown is not None:
            os.environ[_VISIBLE] = shown


def _obstacle(machine: Machine, gpus: int, needs: Needs) -> str | None:
    """Why no trial can run on the machine, in a line; None where one can."""
    obstacles = package_obstacles(machine) if needs.is_engine else ()
    if obstacles:
        return "; ".join(obstacles)
    if needs.program is not None and shutil.which(needs.program) is None:
        return f"the command's program {needs.program!r} is not found there"
    module = needs.data_module
    if module is not None and find_spec(module.partition(".")[0]) is None:
        return f"it has no module {module}"
    if needs.on_gpus and gpus:
        names = {gpu.name for gpu in machine.gpus}
        if len(machine.gpus) < gpus or len(names) > 1:
            seen = ", ".join(sorted(names)) or "none"
            return f"Ray hands out {gpus} GPUs, its driver shows: {seen}"
        try:
            for gpu in machine.gpus:
                refuse_unfit_gpu(gpu.name, gpu.compute_capability)
            if needs.is_engine:
                refuse_torch_without_gpu(machine)
        except MachineError as error:
            return error.problem
    return needs.model.missing()


class TrialOnNode:
    """One trial on this node, in a process of its own, whose death ends the trial's processes."""

    def __init__(self) -> None:
        self._phase, self._ended = "starting", Event()
        self._log_path: Path | None = None
        self._log = b""
        """The whole log, once its file is gone."""
        self._end: TrialEnd | None = None
        self._asked_at = time.monotonic()
        Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()

    def run(self, trial: NodeTrial, model: ModelFiles) -> None:
        """Run the trial; ``tell`` has its end, and the rest of its log."""
        with private_folder(kind="ray-") as folder:
            directory, logs = str(model.placed(folder / "model")), folder / "logs"
            spec = trial.launch.spec.replace(model_directory=directory)
            self._log_path = path = log_path_of(logs, spec, "rung")
            left = self._run(trial, trial.launch.replace(spec=spec), logs)
            files = tuple(
                (name.removeprefix(path.stem), found.read_bytes())
                for found in sorted(path.parent.rglob("*"))
                if (name := str(found.relative_to(path.parent))).startswith(path.stem)
                and found != path
                and found.is_file()
                and found.stat().st_size <= _MOST_FILE_BYTES
            )
            with suppress(OSError):
                self._log = read_file(path, most_bytes=_MOST_FILE_BYTES)
            self._end = TrialEnd(left, files)

    def tell(self, known_bytes: int) -> Told:
        """Tell what the trial is doing, and its log after the bytes that are known."""
        self._asked_at, log = time.monotonic(), b""
        if self._end is not None:
            return Told(self._phase, self._log[known_bytes:], self._end)
        if self._log_path is not None:
            with suppress(OSError), open_regular(self._log_path) as file:  # if it is there yet
                file.seek(known_bytes)
                log = file.read(_CHUNK_BYTES)
        return Told(self._phase, log, None)

    def end(self) -> None:
        """End the trial at once."""
        self._ended.set()

    def _watch(self, ray: int) -> None:
        """End this process, and with it the trial, when its ``ray`` parent is gone, or nobody asks
        any more: the trial is taken for lost, and its GPUs must be free.
        """
        while os.getppid() == ray and time.monotonic() - self._asked_at < _FORGOTTEN_S:
            time.sleep(_WATCHED_S)
        os._exit(1)

    def _run(self, trial: NodeTrial, launch: Launch, logs: Path) -> TrialResult | Refused | str:
        try:
            module, _, maker = trial.launched_by.partition(":")
            make = getattr(import_module(module), maker)(trial.request)
            launcher: Launcher = make(log_directory=logs)
            gpus = None
            if launch.spec.device != "cpu":
                import ray

                # A trial that is alone on its node has been given all of its GPUs.
                assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
                gpus = tuple(assigned[: launch.spec.layout.gpus])
            return launcher.launch(launch, gpus=gpus, ended=self._ended, on_phase=self._hear)
        except HighwaterError as error:
            return refused(error)
        except Exception:  # noqa: BLE001 - the edge of a process: all of it goes to who waits
            return traceback.format_exc()

    def _hear(self, phase: str) -> None:
        self._phase = phase
