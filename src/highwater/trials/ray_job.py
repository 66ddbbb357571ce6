"""A job on a Ray cluster. Its process is the only one that imports Ray: it reads the nodes, or
holds one trial on a node. The second half of the file runs on that node, in a process that Ray
starts.

Ray's output, signals and crashes stay in that process, which ``trials/job.py`` starts, awaits and
ends as any other. When it ends, even by kill -9, Ray ends its processes on all nodes. Ray copies
this package to the nodes.

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
from highwater.nouns.hardware import Machine, unfit_gpu
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
    torch_without_gpu,
    versions_of,
)
from highwater.trials.trial_process import log_path_of, private_folder
from highwater.units import MIB

LAUNCHED_BY = "highwater.trials.foreign_trial:launcher_in"
AUTO = "auto"
"""Address at which Ray searches by itself: ``RAY_ADDRESS``, else this machine's cluster."""
START = "`ray start --head` starts one on this machine"
STATUS = "`ray status` shows the cluster"
READ_S = 120.0
"""Longest time to read the nodes: Ray copies the package there, and torch is asked for GPUs."""
END_S = 40.0
"""Longest time until a trial that is told to end has ended; the reaper takes up to 30 s of it."""
WAITS = "waiting for its place on a node"
_SHOWN = 8
"""Digits of a node's id in messages."""
_ASKED_S = 0.5
"""Seconds between two calls of a trial's ``tell``."""
_FIRST_CHOICE_S = 5.0
"""Seconds that a trial waits for its first choice of node; then any suitable node will do."""
_ANSWER_S = 10.0
"""Longest wait for one answer, in seconds; a busy node is asked again."""
_FORGOTTEN_S = 120.0
"""Seconds without a call of ``tell`` after which a trial ends itself. A node that does not answer
for half of them counts as lost. Ray itself takes about 20: five health checks, 3 s apart."""
_WATCHED_S = 1.0
_GONE_S = 5.0
"""Longest time, in seconds, until Ray has ended the process that held a trial on its node."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MEMORY_MONITOR = "RAY_memory_usage_threshold"
"""Name in Ray's error if its memory monitor ended a process because the node's memory was full."""
_MOST_FILE_BYTES = 256 * MIB
"""Largest file beside a trial's log that is copied back; larger ones are lost with their folder."""
_CHUNK_BYTES = 4 * MIB


class Needs(Record, frozen=True, kw_only=True):
    """What every node of a cluster must have for a search's trials."""

    on_gpus: bool
    model: ModelFiles
    data_module: str | None = None
    """The user's module that yields batches; None without one."""
    is_engine: bool = True
    """True if this package's engine trains, rather than another trainer."""
    program: str | None = None
    """The program that starts another trainer; None: none is named."""


class Node(Record, frozen=True, kw_only=True):
    """One node of a Ray cluster: what Ray may give trials there, and the machine as read."""

    node_id: str
    cpus: float
    gpus: int
    memory_bytes: int
    """Host memory that Ray assigns; it keeps some for its object store."""
    machine: Machine | None = None
    """The machine as a process there read it, with Ray's share of memory; None: not readable."""
    problem: str | None = None
    """Why no trial can run on it; None where one can."""

    @property
    def name(self) -> str:
        """The node's short name in messages: the first digits of its id, as Ray prints it."""
        return _name(self.node_id)

    @property
    def read(self) -> Machine:
        """The machine of a node that was readable."""
        assert self.machine is not None  # noqa: S101
        return self.machine

    def lack(self, device: Device) -> str | None:
        """Reason why no trial on ``device`` can run on this node; None if one can."""
        if self.problem is not None or (self.gpus if device == "cuda" else self.cpus):
            return self.problem
        return "it has no GPU" if device == "cuda" else "Ray hands out no CPU there"

    def kind(self, device: Device) -> tuple[str, str]:
        """GPU name and torch version, which must be equal on all nodes of a study."""
        name = "" if device == "cpu" else self.read.gpus[0].name
        return name, self.read.versions.get("torch", "")


def _name(node_id: str) -> str:
    return f"node {node_id[:_SHOWN]}"


class Demand(Record, frozen=True, kw_only=True):
    """GPUs, CPU cores and bytes of memory that a trial takes on one node."""

    gpus: int
    cpus: float
    memory_bytes: int
    whole_node: bool
    """True if no other trial of ours may run there: on the CPU, and with tensors in host memory."""

    @property
    def bundle(self) -> dict[str, float]:
        """The resources to request, by Ray's names."""
        asked = {"GPU": self.gpus, "CPU": self.cpus, "memory": self.memory_bytes}
        return {name: value for name, value in asked.items() if value}


class Wanted(Record, frozen=True, kw_only=True):
    """Resources that a trial requests from Ray, and the nodes that have them."""

    demand: Demand
    first: str
    """Id of the node on which the trial leaves the others the most room."""
    any_of: tuple[str, ...]
    """Ids of the nodes that will do if others use the first one."""


class NodeTrial(Record, frozen=True, kw_only=True):
    """A trial that is to run on a node."""

    launch: Launch
    request: Request
    """The request that the node makes its launcher from."""
    launched_by: str
    """``module:function`` of the function that makes a launcher from a request."""
    log_path: str
    """An empty log on this machine, to which the trial's log is copied."""
    wanted: Wanted


class RayOrder(Record, frozen=True, kw_only=True):
    """Order to a process on a Ray cluster: run a trial or, if there is none, read the nodes."""

    address: str
    needs: Needs
    trial: NodeTrial | None = None


class RayReport(Record, frozen=True, kw_only=True):
    """Report of a process on a Ray cluster: the nodes that it read, or its trial's result."""

    nodes: tuple[Node, ...] = ()
    """The nodes that are alive."""
    result: TrialResult | None = None
    error: str | None = None
    """Traceback if our code failed on the node."""
    lost_on: str | None = None
    """The node on which the trial was lost; None if it was not."""
    has_lost_node: bool = False
    """True if that node is gone."""


def main() -> None:
    """Execute the order in this process, and exit."""
    with suppress(TrialEndedError):
        serve(RayOrder, _work)
    sys.stderr.flush()
    os._exit(0)  # Ray ends what was started for this process; its own exit takes seconds


def _work(order: RayOrder, folder: Path) -> RayReport:
    _join(order.address)
    if order.trial is None:
        return RayReport(nodes=tuple(_nodes(order.needs)))
    return _run_trial(order.trial, order.needs.model, folder)


def _join(address: str) -> None:
    """Join a running cluster; none is started."""
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
    """Yield the nodes that are alive; processes on all of them read them at the same time."""
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
        except Exception as error:  # noqa: BLE001 - a process far away may fail to import anything
            problem = f"it cannot be read: {_first_line(error)}"
        memory_bytes = int(resources.get("memory", 0))
        if machine is not None:  # a prediction has to fit into the memory that Ray assigns
            machine = machine.with_memory(memory_bytes)
        yield Node(
            node_id=each["NodeID"],
            cpus=resources.get("CPU", 0.0),
            gpus=int(resources.get("GPU", 0)),
            memory_bytes=memory_bytes,
            machine=machine,
            problem=problem,
        )


def _run_trial(trial: NodeTrial, model: ModelFiles, folder: Path) -> RayReport:
    """Run a trial on a node from its placement to its end; SIGTERM ends it."""
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
    """Wait for a placement on one node; TrialEndedError if ended, RayError if no node is left."""
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
    """Run a trial in its placement. Raises RayError if it is lost, and TrialEndedError."""
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    import ray

    demand = trial.wanted.demand
    made = ray.remote(TrialOnNode).options(
        num_cpus=demand.cpus,
        num_gpus=demand.gpus,
        memory=demand.memory_bytes or None,
        max_concurrency=4,  # its methods ``run``, ``tell`` and ``end`` are called side by side
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        # Set before the process starts. Else Ray, which kills the children of a process that it
        # ends by -9, would kill the reaper too and orphan the trial; the reaper ends all by itself.
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
        # ``kill`` returns at once: wait until nothing is left of the trial.
        until = time.monotonic() + _GONE_S
        with suppress(RayError):
            while time.monotonic() < until:
                ray.get(actor.end.remote(), timeout=_GONE_S)


def _end_of(actor: Any, log_path: Path, folder: Path, ended: Event) -> "TrialEnd":
    """Copy a trial's log and phase from its node until it ends; end it after ``ended`` is set."""
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
                # The node may answer again, or Ray finds that it is gone.
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
    """Ids of the nodes that Ray counts as alive."""
    import ray

    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def loss_reason(error: BaseException) -> str:
    """Reason, in one line, why a trial was lost."""
    text = str(error).strip() or repr(error)
    if _MEMORY_MONITOR in text:
        return "the node's memory was full, and Ray's memory monitor ended what ran there"
    # The reason for an actor's death follows its name and its id.
    return text.splitlines()[-1].partition(" Some common causes")[0]


# The rest runs on a node, in a process that Ray starts there:


class TrialEnd(NamedTuple):
    """How a trial ended on its node: its result, refusal or traceback; and files beside its log."""

    left: TrialResult | Refused | str
    """Its result, its refusal, or the traceback of an error of ours."""
    files: tuple[tuple[str, bytes], ...] = ()
    """Files beside the log: the part of the path after the log's stem, and the content."""


class Told(NamedTuple):
    """State of a running trial on a node: its phase, the new part of its log, and its end."""

    phase: str
    log: bytes
    """Content of the log after the bytes that are known already."""
    end: TrialEnd | None
    """None while the trial runs."""


def read_node(gpus: int, needs: Needs) -> tuple[Machine, str | None]:
    """Read this node with its first ``gpus`` GPUs; and why it can run no trial, None if it can."""
    # Ray hides the GPUs from a process that requested none.
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
    """Reason, in one line, why no trial can run on the machine; None if one can."""
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
        unfit = (unfit_gpu(gpu.name, gpu.compute_capability) for gpu in machine.gpus)
        error = next(filter(None, unfit), None)
        if error is None and needs.is_engine:
            error = torch_without_gpu(machine)
        if error is not None:
            return error.problem
    return needs.model.missing()


class TrialOnNode:
    """One trial on this node, in a new process; the trial's processes end with this one."""

    def __init__(self) -> None:
        self._phase, self._ended = "starting", Event()
        self._log_path: Path | None = None
        self._log = b""
        """The whole log, after its file is removed."""
        self._end: TrialEnd | None = None
        self._asked_at = time.monotonic()
        Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()

    def run(self, trial: NodeTrial, model: ModelFiles) -> None:
        """Run the trial; ``tell`` then returns its end and the rest of its log."""
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
        """The trial's phase, and its log after the first ``known_bytes``."""
        self._asked_at, log = time.monotonic(), b""
        if self._end is not None:
            return Told(self._phase, self._log[known_bytes:], self._end)
        if self._log_path is not None:
            with suppress(OSError), open_regular(self._log_path) as file:  # maybe not there yet
                file.seek(known_bytes)
                log = file.read(_CHUNK_BYTES)
        return Told(self._phase, log, None)

    def end(self) -> None:
        """End the trial at once."""
        self._ended.set()

    def _watch(self, ray: int) -> None:
        """End this process, and so the trial, if its parent (process id ``ray``) has ended or
        ``tell`` is no longer called: then the trial counts as lost, and must leave its GPUs.
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

                # A trial that is alone on its node was assigned all of its GPUs.
                assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
                gpus = tuple(assigned[: launch.spec.layout.gpus])
            return launcher.launch(launch, gpus=gpus, ended=self._ended, on_phase=self._hear)
        except HighwaterError as error:
            return refused(error)
        except Exception:  # noqa: BLE001 - the edge of a process: all of it goes to who waits
            return traceback.format_exc()

    def _hear(self, phase: str) -> None:
        self._phase = phase
