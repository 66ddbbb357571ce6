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

import msgspec

from highwater.errors import HighwaterError, MachineError
from highwater.nouns.codec import Record, open_regular, read_file
from highwater.nouns.environment import allocator_environment
from highwater.nouns.hardware import Machine, refuse_unfit_gpu
from highwater.nouns.request import Request
from highwater.nouns.trial import (
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
"""Bytes of one file that a trial left beside its log, at the most; a larger one stays, and goes
with its folder."""
_CHUNK_BYTES = 4 * MIB


class Needs(Record, frozen=True, kw_only=True):
    """What the trials of a search need on each node."""

    on_gpus: bool
    model: ModelFiles
    data_module: str | None = None
    """The user's module that yields batches, if any."""
    is_engine: bool = True
    """Whether this package's engine trains, not another trainer."""
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
    """What a process on the node read; its GPUs are those that Ray hands out. None: it could not
    be read."""
    problem: str | None = None
    """Why no trial can run on it; None where one can."""

    @property
    def name(self) -> str:
        """What it is called in a message; Ray's own commands show the same digits first."""
        return _name(self.node_id)


def _name(node_id: str) -> str:
    return f"node {node_id[:_SHOWN]}"


class NodeTrial(Record, frozen=True, kw_only=True):
    """A trial that is to run on a node."""

    launch: Launch
    request: Request
    """What was asked, of which its launcher is made."""
    launched_by: str
    """Module and function that make the launcher of a request."""
    log_path: str
    """An empty log on this machine, which what the trial says is added to."""
    bundle: dict[str, float]
    """What Ray reserves for it on one node, by Ray's names."""
    first: str
    """The node on which it leaves other trials the most room."""
    any_of: tuple[str, ...]
    """The nodes that will do where others use the first one."""


class RayOrder(Record, frozen=True, kw_only=True):
    """What is asked of a cluster: to run a trial, or without one what its nodes are."""

    address: str
    needs: Needs
    trial: NodeTrial | None = None


class RayReport(Record, frozen=True, kw_only=True):
    """What came of an order."""

    nodes: tuple[Node, ...] = ()
    """The nodes that are alive."""
    result: TrialResult | None = None
    lost_on: str | None = None
    """The node on which the trial was lost, if it was."""
    has_lost_node: bool = False
    """Whether that node is gone."""
    error: str | None = None
    """The text of an error of ours, on the node."""


def main() -> None:
    """Be the process of a job."""
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
        yield Node(
            node_id=each["NodeID"],
            cpus=resources.get("CPU", 0.0),
            gpus=int(resources.get("GPU", 0)),
            memory_bytes=int(resources.get("memory", 0)),
            machine=machine,
            problem=problem,
        )


def _held(trial: NodeTrial, model: ModelFiles, folder: Path) -> RayReport:
    """Hold a trial from its place on a node to its end there; SIGTERM ends it."""
    from ray.exceptions import RayError

    ended = Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # only now: Ray has taken it in ``init``
    held, began = _HeldTrial(trial, model, folder, ended), time.monotonic()
    try:
        end = held.run()
        if end.refused is not None:
            raise end.refused.error()
        if end.result is None:
            return RayReport(error=end.error)
        for name, content in end.files:
            _write_beside(Path(trial.log_path), name, content)
        return RayReport(result=msgspec.structs.replace(end.result, log_path=trial.log_path))
    except RayError as error:
        name = "every node for it" if held.node_id is None else _name(held.node_id)
        is_there = held.node_id in _alive()
        if is_there:
            reason = f"Ray lost the trial on {name}: {loss_reason(error)}"
        else:
            reason = f"{name} of the Ray cluster was lost"
        with Path(trial.log_path).open("ab") as log:
            log.write(f"\n{reason}\n".encode())
        result = TrialResult(
            outcome=Outcome.CRASHED,
            reason=reason,
            attempt=trial.launch.attempt,
            log_path=trial.log_path,
            wall_s=time.monotonic() - began,
        )
        lost_on = held.node_id or ""
        return RayReport(result=result, lost_on=lost_on, has_lost_node=not is_there)
    except OSError as error:
        raise MachineError(
            f"what the trial says could not be recorded: {error}",
            hint=f"make room and check the rights of {Path(trial.log_path).parent}, or use another "
            "`--log-dir`",
        ) from error


class _HeldTrial:
    """A trial on the cluster, seen from here."""

    def __init__(self, trial: NodeTrial, model: ModelFiles, folder: Path, ended: Event) -> None:
        self._trial, self._model, self._folder, self._ended = trial, model, folder, ended
        self.node_id: str | None = None
        """Where it runs; None: it waits for its place."""

    def run(self) -> "TrialEnd":
        """Wait for a place, run the trial there, and tell what it is doing.

        Raises RayError where it was lost.
        """
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        import ray

        group = self._place()
        if group is None:
            return TrialEnd()
        bundle, spec = self._trial.bundle, self._trial.launch.spec
        made = ray.remote(TrialOnNode).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory"),
            max_concurrency=4,  # it runs, tells, and is told to end
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            ),
            # There before the process starts. Ray would kill the children of a process that it
            # ends with -9, the reaper too, and orphan the trial; the reaper ends all by itself.
            runtime_env={
                "env_vars": {
                    **allocator_environment(spec.settings.allocator),
                    "RAY_kill_child_processes_on_worker_exit": "0",
                }
            },
        )
        actor: Any = made.remote()
        try:
            actor.run.remote(self._trial, self._model)
            return self._follow(actor)
        finally:
            ray.kill(actor)
            # Ray only passes that on: who is told that the trial ended finds nothing left of it.
            until = time.monotonic() + _GONE_S
            with suppress(RayError):
                while time.monotonic() < until:
                    ray.get(actor.end.remote(), timeout=_GONE_S)

    def _place(self) -> Any:
        """The placement group that has a part of one node; None where the trial is ended first."""
        from ray.exceptions import NodeDiedError
        from ray.util import placement_group_table, remove_placement_group

        group = self._group((self._trial.first,))
        until = time.monotonic() + _FIRST_CHOICE_S
        while not group.wait(_ASKED_S):
            if self._ended.is_set():
                return None
            if not _alive() & {self._trial.first, *self._trial.any_of}:
                raise NodeDiedError("every node that could hold the trial is gone")
            if time.monotonic() > until:
                remove_placement_group(group)
                group, until = self._group(self._trial.any_of), float("inf")
        self.node_id = str(placement_group_table(group)["bundles_to_node_id"][0])
        return group

    def _group(self, node_ids: tuple[str, ...]) -> Any:
        """A placement group of one bundle: all of the trial is on one of these nodes."""
        from ray.util import placement_group

        chosen = {"ray.io/node-id": f"in({','.join(node_ids)})"}
        return placement_group(
            [self._trial.bundle], strategy="STRICT_PACK", bundle_label_selector=[chosen]
        )

    def _follow(self, actor: Any) -> "TrialEnd":
        """Tell what the trial is doing, and end it when told; returns its end."""
        from ray.exceptions import ActorUnavailableError, GetTimeoutError

        import ray

        known_bytes, heard_at, told_to_end_at = 0, time.monotonic(), None
        with Path(self._trial.log_path).open("ab", buffering=0) as log:
            while told_to_end_at is None or time.monotonic() - told_to_end_at < END_S:
                if self._ended.is_set() and told_to_end_at is None:
                    told_to_end_at = time.monotonic()
                    actor.end.remote()
                try:
                    told: Any = ray.get(actor.tell.remote(known_bytes), timeout=_ANSWER_S)
                except (ActorUnavailableError, GetTimeoutError):
                    # It may be back, or Ray finds out that its node is gone.
                    if time.monotonic() - heard_at > _FORGOTTEN_S / 2:
                        raise
                else:
                    heard_at = time.monotonic()
                    known_bytes += len(told.log)
                    log.write(told.log)
                    tell_phase(self._folder, told.phase)
                    if told.end is not None:
                        return told.end
                self._ended.wait(_ASKED_S) if told_to_end_at is None else time.sleep(_ASKED_S)
        return TrialEnd()


def _alive() -> set[str]:
    """The ids of the nodes that Ray takes for alive."""
    import ray

    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}


def _write_beside(log_path: Path, name: str, content: bytes) -> None:
    """Write what a trial left beside its log, called as the log is but for the end."""
    path = log_path.parent / f"{log_path.stem}{name}"
    if ".." in PurePath(name).parts:
        raise OSError(f"{name} is no name of a file beside a log")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def loss_reason(error: BaseException) -> str:
    """Why a trial was lost, in a line."""
    text = str(error).strip() or repr(error)
    if _MEMORY_MONITOR in text:
        return "the node's memory was full, and Ray's memory monitor ended what ran there"
    # Why an actor died comes after its name and its number.
    return text.splitlines()[-1].partition(" Some common causes")[0]


# What runs on a node, in a process that Ray starts there:


class TrialEnd(NamedTuple):
    """The end of a trial: one of its result, a refusal, the text of an error, or nothing of all
    that where it was ended.
    """

    result: TrialResult | None = None
    refused: Refused | None = None
    error: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()
    """What the trial left beside its log: by what follows the log's own name, less its suffix."""


class Told(NamedTuple):
    """What a trial says of itself while it runs."""

    phase: str
    log: bytes
    """What its log has after what is known of it."""
    end: TrialEnd | None
    """None while it runs."""


def read_node(gpus: int, needs: Needs) -> tuple[Machine, str | None]:
    """Read the node that this runs on, of which Ray hands out so many GPUs; and why no trial can
    run there, None where one can.
    """
    # Ray hides the GPUs of a process that asked for none.
    shown = os.environ.pop(_VISIBLE, None)
    try:
        machine = probe()
        machine = msgspec.structs.replace(
            machine, gpus=machine.gpus[:gpus], versions={**machine.versions, **versions_of(OLDEST)}
        )
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
        self._phase = "starting"
        self._ended = Event()
        self._log_path: Path | None = None
        self._whole_log: bytes | None = None
        """The log, once its file is gone."""
        self._end: TrialEnd | None = None
        self._asked_at = time.monotonic()
        Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()

    def run(self, trial: NodeTrial, model: ModelFiles) -> None:
        """Run the trial; ``tell`` has its end, and the rest of its log."""
        with private_folder(kind="ray-") as folder:
            directory = str(model.placed(folder / "model"))
            spec = msgspec.structs.replace(trial.launch.spec, model_directory=directory)
            launch = msgspec.structs.replace(trial.launch, spec=spec)
            self._log_path = log_path_of(folder / "logs", spec, "rung")
            end = self._run(trial, launch, folder / "logs")
            files = tuple(_beside(self._log_path))
            try:
                self._whole_log = read_file(self._log_path, most_bytes=_MOST_FILE_BYTES)
            except OSError:
                self._whole_log = b""
        self._end = end._replace(files=files)

    def tell(self, known_bytes: int) -> Told:
        """What the trial is doing, and its log after the bytes that are known."""
        self._asked_at = time.monotonic()
        end, whole, log = self._end, self._whole_log, b""
        if whole is not None:
            return Told(self._phase, whole[known_bytes:], end)
        try:
            if self._log_path is not None:
                with open_regular(self._log_path) as file:
                    file.seek(known_bytes)
                    log = file.read(_CHUNK_BYTES)
        except OSError:
            pass  # it is not there yet
        return Told(self._phase, log, None)

    def end(self) -> None:
        """End the trial at once."""
        self._ended.set()

    def _watch(self, ray: int) -> None:
        """End this process, and the reaper with it the trial, when what Ray runs on the node is
        gone, whose process ``ray`` is, or when nobody asks any more: the trial is taken for lost,
        and its GPUs must be free.
        """
        while os.getppid() == ray and time.monotonic() - self._asked_at < _FORGOTTEN_S:
            time.sleep(_WATCHED_S)
        os._exit(1)

    def _run(self, trial: NodeTrial, launch: Launch, logs: Path) -> TrialEnd:
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
            result = launcher.launch(launch, gpus=gpus, ended=self._ended, on_phase=self._hear)
        except TrialEndedError:
            return TrialEnd()
        except HighwaterError as error:
            return TrialEnd(refused=refused(error))
        except Exception:  # noqa: BLE001 - the edge of a process: all of it goes to who waits
            return TrialEnd(error=traceback.format_exc())
        return TrialEnd(result=result)

    def _hear(self, phase: str) -> None:
        self._phase = phase


def _beside(log_path: Path) -> Iterator[tuple[str, bytes]]:
    """The files that a trial left beside its log, called as the log is but for the end."""
    for path in sorted(log_path.parent.rglob("*")):
        name = str(path.relative_to(log_path.parent))
        if path == log_path or not path.is_file() or not name.startswith(log_path.stem):
            continue
        if path.stat().st_size <= _MOST_FILE_BYTES:
            yield name.removeprefix(log_path.stem), path.read_bytes()
