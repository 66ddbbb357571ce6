"""``highwater doctor``: what works on this machine, what to install for the rest, and what the
machine is.
"""

import argparse
from collections.abc import Iterator

import msgspec

from highwater.cli import console
from highwater.errors import EXIT_ANSWERED, EXIT_MACHINE, HighwaterError, MachineError
from highwater.nouns.codec import Record
from highwater.nouns.hardware import (
    CPU_SEARCH,
    MEASURED_SCHEMA_VERSION,
    Constants,
    Gpu,
    Machine,
    Reading,
    refuse_unfit_gpu,
)
from highwater.nouns.study import counted_ranks
from highwater.pages.table import TextTable
from highwater.pages.text import plain
from highwater.trials.measurements import read_constants
from highwater.trials.probe import (
    INSTALL_COMMAND,
    INSTALL_HINT,
    busy_gpus,
    leave_out_unreadable,
    package_obstacles,
    probe,
    refuse_torch_without_gpu,
)
from highwater.trials.readiness import Feature, features
from highwater.units import counted, format_bytes

_KEEP_CONSTANTS = "highwater doctor --measure --json > constants.json"
"""The next command after ``--measure``; ``highwater predict --constants constants.json`` reads the
file that it writes."""


_PREDICTION = "highwater predict Qwen3-8B --gpus 4xA100-80GB"
"""The next command where predictions are all that works."""
_QUESTIONS = "`predict`, `recommend`, `guide` and `emit`"
_TRIALS = "trials (`find`, `try`)"


class Finding(Record, frozen=True, kw_only=True):
    """Something to know, and what to do about it."""

    problem: str
    hint: str
    stops_every_trial: bool


class Diagnosis(Record, frozen=True, kw_only=True):
    """The document that ``highwater doctor --json`` prints."""

    schema_version: int = MEASURED_SCHEMA_VERSION
    machine: Machine
    findings: tuple[Finding, ...]
    features: tuple[Feature, ...] = ()
    """What can be done with the packages that are installed, and what the rest needs."""
    constants: tuple[Constants, ...] = ()
    """Constants that ``--measure`` read, by number of GPUs; empty without it."""

    @property
    def can_run(self) -> bool:
        """Whether a trial can run here."""
        return not any(finding.stops_every_trial for finding in self.findings)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing for what is installed: either all that trials need, or none
        of it, as where one only predicts.
        """
        return self.can_run or not {"torch", "transformers"} & self.machine.versions.keys()


def doctor(arguments: argparse.Namespace) -> int:
    """Print what works, and the diagnosis; exit code 3 when something is missing for what is
    installed.
    """
    machine = probe()
    torch_obstacle = _torch_obstacle(machine)
    diagnosis = msgspec.structs.replace(
        diagnose(machine, torch_obstacle=torch_obstacle), features=features(machine)
    )
    if arguments.measure:
        diagnosis = msgspec.structs.replace(diagnosis, constants=_measured(machine))
    code = EXIT_ANSWERED if diagnosis.is_sound else EXIT_MACHINE
    if arguments.json:
        console.answer_json(diagnosis)
        return code
    console.answer(f"{_in_a_sentence(diagnosis, torch_obstacle)}\n")
    console.answer_table(_feature_table(diagnosis.features))
    console.answer("")
    if machine.gpus:
        console.answer_table(_gpu_table(machine))
        console.answer("")
    console.answer_table(_host_table(machine))
    if diagnosis.constants:
        console.answer("")
        console.answer_table(_constants_table(diagnosis.constants))
    for finding in diagnosis.findings:
        if not finding.stops_every_trial:  # packages: said above
            console.answer(f"\n{finding.problem}\n  {finding.hint}")
    if diagnosis.can_run:
        on_gpu = bool(machine.gpus) and torch_obstacle is None
        search = "highwater find Qwen3-0.6B" if on_gpu else CPU_SEARCH
        console.next_command(_KEEP_CONSTANTS if arguments.measure else search)
    elif diagnosis.is_sound:
        console.next_command(_PREDICTION)
    else:
        console.next_command(f"{INSTALL_COMMAND}  (in the checkout of highwater)")
    return code


def diagnose(machine: Machine, *, torch_obstacle: HighwaterError | None = None) -> Diagnosis:
    """What stands in the way of trials on a machine; pure. ``torch_obstacle`` is why torch cannot
    use its GPUs.
    """
    findings = [
        Finding(problem=problem, hint=INSTALL_HINT, stops_every_trial=True)
        for problem in package_obstacles(machine)
    ]
    findings += [
        Finding(
            problem=f"GPU {gpu.index} cannot be read: {gpu.reason}",
            hint=leave_out_unreadable(machine),
            stops_every_trial=False,
        )
        for gpu in machine.unreadable_gpus
    ]
    if torch_obstacle is not None:
        findings.append(_of_error(torch_obstacle))
    if not machine.gpus and not machine.unreadable_gpus:
        findings.append(
            Finding(
                problem="no GPU is visible"
                if findings
                else "no GPU is visible: trials run on the CPU, with small models, under a memory "
                "limit",
                hint="with a GPU in the machine, check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
                stops_every_trial=False,
            )
        )
    return Diagnosis(machine=machine, findings=(*findings, *_of_gpus(machine)))


def _of_gpus(machine: Machine) -> Iterator[Finding]:
    """Findings about GPUs that trials cannot use, or would share."""
    for gpu in machine.gpus:
        unfit = _unfit(gpu)
        if unfit is not None:
            yield _of_error(unfit)
    busy = busy_gpus(machine.gpus)
    if busy:
        free = ",".join(str(gpu.index) for gpu in machine.gpus if gpu not in busy)
        yield Finding(
            problem=f"GPU {', '.join(str(gpu.index) for gpu in busy)} in use: trials would "
            f"measure somebody else's memory",
            hint=f"set CUDA_VISIBLE_DEVICES={free}"
            if free
            else "wait until one is free, or add `--allow-busy`",
            stops_every_trial=False,
        )


def _unfit(gpu: Gpu) -> HighwaterError | None:
    """Why no trial can use a GPU; None where one can."""
    try:
        refuse_unfit_gpu(gpu.name, gpu.compute_capability)
    except HighwaterError as error:
        return error
    return None


def _of_error(error: HighwaterError) -> Finding:
    return Finding(problem=error.problem, hint=error.hint, stops_every_trial=False)


def _torch_obstacle(machine: Machine) -> HighwaterError | None:
    if not machine.gpus or package_obstacles(machine):
        return None
    try:
        refuse_torch_without_gpu(machine)
    except HighwaterError as error:
        return error
    return None


def _in_a_sentence(diagnosis: Diagnosis, torch_obstacle: HighwaterError | None) -> str:
    """What works here, and why the rest does not."""
    machine = diagnosis.machine
    if not diagnosis.can_run:
        whys = (each.problem for each in diagnosis.findings if each.stops_every_trial)
        return f"{_QUESTIONS} work here, for any GPUs; {_TRIALS} do not: {', '.join(whys)}."
    fit = [gpu for gpu in machine.gpus if _unfit(gpu) is None]
    if fit and torch_obstacle is None:
        return f"{_QUESTIONS} work here, and {_TRIALS} on {counted(len(fit), 'GPU')}."
    why = (
        torch_obstacle.problem
        if torch_obstacle is not None
        else "no GPU here is fit for training"
        if machine.gpus
        else "no GPU is visible"
    )
    return (
        f"{_QUESTIONS} work here, for any GPUs; {_TRIALS} run on the CPU, with small models: {why}."
    )


def _feature_table(rows: tuple[Feature, ...]) -> TextTable:
    """What works, and then what to install for the rest."""
    return TextTable(
        title="what works here, and what to install for the rest (in the checkout of highwater)",
        columns=("", "works", "to install"),
        rows=tuple(
            (
                each.what,
                "yes" if each.works else f"no: {', '.join(map(plain, each.obstacles))}",
                "" if each.works else each.install,
            )
            for each in sorted(rows, key=lambda each: not each.works)
        ),
        left_columns=3,
    )


def _gpu_table(machine: Machine) -> TextTable:
    busy = busy_gpus(machine.gpus)
    return TextTable(
        title=f"GPUs, driver {plain(machine.driver_version or '?')}",
        columns=("GPU", "name", "state", "memory", "in use", "processes"),
        rows=tuple(_gpu_row(gpu, "in use" if gpu in busy else "free") for gpu in machine.gpus),
    )


def _gpu_row(gpu: Gpu, state: str) -> tuple[str, ...]:
    return (
        str(gpu.index),
        plain(gpu.name),
        state,
        format_bytes(gpu.memory_total_bytes),
        format_bytes(gpu.memory_used_bytes),
        " ".join(map(str, gpu.processes)) or "-",
    )


def _host_table(machine: Machine) -> TextTable:
    memory = (
        f"{format_bytes(machine.host_memory_available_bytes)} free of "
        f"{format_bytes(machine.host_memory_total_bytes)}"
    )
    rows = (
        ("CPU cores", str(machine.cpu_cores)),
        ("host memory", memory),
        *sorted(machine.versions.items()),
    )
    return TextTable(
        title="machine",
        columns=(),
        rows=tuple((name, plain(text)) for name, text in rows),
        left_columns=2,
    )


def _measured(machine: Machine) -> tuple[Constants, ...]:
    """Constants as read on one GPU, and on each power of two up to all of them."""
    if not machine.gpus:
        raise MachineError(
            "no GPU is visible: there is nothing to measure", hint="leave `--measure` out"
        )
    counts = [1]
    while 2 * counts[-1] <= len(machine.gpus):
        counts.append(2 * counts[-1])
    found: list[Constants] = []
    for count in counts:
        console.talk(
            f"reading what libraries take on {counted_ranks(count, 'cuda')}, up to half a minute"
        )
        found.append(read_constants(count))
    return tuple(found)


def _constants_table(constants: tuple[Constants, ...]) -> TextTable:
    """A row for each thing, in the order of its first use; what the allocator keeps of it in
    brackets.
    """
    names = list(dict.fromkeys(reading.name for each in constants for reading in each.readings))
    columns = [{reading.name: reading for reading in each.readings} for each in constants]
    rows = [(plain(name), *(_taken(column.get(name)) for column in columns)) for name in names]
    totals = tuple(format_bytes(each.outside_bytes(*names)) for each in constants)
    return TextTable(
        title="measured: memory beside tensors at the first use of each, a GPU (in brackets: kept "
        "in the allocator)",
        columns=("", *(counted_ranks(each.gpus, "cuda") for each in constants)),
        rows=(*rows, ("outside the allocator, together", *totals)),
        left_columns=1,
    )


def _taken(reading: Reading | None) -> str:
    if reading is None:
        return "-"
    kept = f" ({format_bytes(reading.allocator_bytes)})" if reading.allocator_bytes else ""
    return f"{format_bytes(reading.outside_bytes)}{kept}"
