"""``highwater doctor``: features that work on this machine, packages to install, its hardware."""

import argparse
from collections.abc import Sequence

from highwater.cli import console
from highwater.errors import EXIT_ANSWERED, EXIT_MACHINE, HighwaterError, MachineError
from highwater.nouns.codec import Record
from highwater.nouns.hardware import (
    CPU_SEARCH,
    MEASURED_SCHEMA_VERSION,
    Constants,
    Machine,
    Reading,
    unfit_gpu,
)
from highwater.nouns.study import counted_ranks
from highwater.pages.table import TextTable, table_of
from highwater.pages.text import plain
from highwater.trials.measurements import read_constants
from highwater.trials.probe import (
    INSTALL_COMMAND,
    INSTALL_HINT,
    PREDICTION,
    busy_gpus,
    leave_out_unreadable,
    package_obstacles,
    probe,
    torch_without_gpu,
)
from highwater.trials.readiness import Feature, features
from highwater.units import counted, format_bytes

_KEEP_CONSTANTS = "highwater doctor --measure --json > constants.json"
"""The next command after ``--measure``: ``predict --constants`` reads the file it writes."""
_QUESTIONS = "`predict`, `recommend`, `guide` and `emit` work here"
_TRIALS = "trials (`find`, `try`)"


class Finding(Record, frozen=True, kw_only=True):
    """A problem that the doctor found on this machine, and a hint that solves it."""

    problem: str
    hint: str
    stops_every_trial: bool = False


class Diagnosis(Record, frozen=True, kw_only=True):
    """What ``highwater doctor --json`` prints: the machine, and what keeps trials off it."""

    schema_version: int = MEASURED_SCHEMA_VERSION
    machine: Machine
    findings: tuple[Finding, ...]
    features: tuple[Feature, ...] = ()
    """Commands and options, whether their packages are installed, and what to install if not."""
    constants: tuple[Constants, ...] = ()
    """Constants that ``--measure`` read, by number of GPUs; empty without it."""

    @property
    def can_run(self) -> bool:
        """True if trials can run on this machine."""
        return not any(finding.stops_every_trial for finding in self.findings)

    @property
    def is_sound(self) -> bool:
        """True if trials can run here, or if only torch is missing: predictions need none."""
        return self.can_run or not {"torch", "transformers"} & self.machine.versions.keys()


def doctor(arguments: argparse.Namespace) -> int:
    """Print working features and the diagnosis; exit code 3 unless the machine ``is_sound``."""
    machine = probe()
    obstacle = None
    if machine.gpus and not package_obstacles(machine):
        obstacle = torch_without_gpu(machine)
    diagnosis = diagnose(machine, torch_obstacle=obstacle).replace(
        features=features(machine), constants=_measured(machine) if arguments.measure else ()
    )
    code = EXIT_ANSWERED if diagnosis.is_sound else EXIT_MACHINE
    if arguments.json:
        return console.answer_json(diagnosis, code)
    console.answer_page(
        _in_a_sentence(diagnosis, obstacle),
        _feature_table(diagnosis.features),
        *((_gpu_table(machine),) if machine.gpus else ()),
        _host_table(machine),
        *((_constants_table(diagnosis.constants),) if diagnosis.constants else ()),
    )
    for finding in diagnosis.findings:
        if not finding.stops_every_trial:  # packages are named above
            console.answer(f"\n{finding.problem}\n  {finding.hint}")
    if diagnosis.can_run:
        on_gpu = bool(machine.gpus) and obstacle is None
        search = "highwater find Qwen3-0.6B" if on_gpu else CPU_SEARCH
        console.next_command(_KEEP_CONSTANTS if arguments.measure else search)
    else:
        install = f"{INSTALL_COMMAND}  (in the checkout of highwater)"
        console.next_command(PREDICTION if diagnosis.is_sound else install)
    return code


def diagnose(machine: Machine, *, torch_obstacle: HighwaterError | None = None) -> Diagnosis:
    """What keeps trials off a machine; nothing is read. ``torch_obstacle``: torch's own fault."""
    packages = package_obstacles(machine)
    findings = [
        Finding(problem=each, hint=INSTALL_HINT, stops_every_trial=True) for each in packages
    ]
    for gpu in machine.unreadable_gpus:
        problem = f"GPU {gpu.index} cannot be read: {gpu.reason}"
        findings.append(Finding(problem=problem, hint=leave_out_unreadable(machine)))
    findings += [_finding(torch_obstacle)] if torch_obstacle is not None else []
    if not machine.gpus and not machine.unreadable_gpus:
        on_the_cpu = ": trials run on the CPU, with small models, under a memory limit"
        hint = "with a GPU in the machine, check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        problem = f"no GPU is visible{'' if findings else on_the_cpu}"
        findings.append(Finding(problem=problem, hint=hint))
    unfit = (unfit_gpu(gpu.name, gpu.compute_capability) for gpu in machine.gpus)
    findings += [_finding(error) for error in unfit if error is not None]
    busy = busy_gpus(machine.gpus)
    if busy:
        free = ",".join(str(gpu.index) for gpu in machine.gpus if gpu not in busy)
        wait = "wait until one is free, or add `--allow-busy`"
        finding = Finding(
            problem=f"GPU {', '.join(str(gpu.index) for gpu in busy)} in use: trials would "
            f"measure somebody else's memory",
            hint=f"set CUDA_VISIBLE_DEVICES={free}" if free else wait,
        )
        findings.append(finding)
    return Diagnosis(machine=machine, findings=tuple(findings))


def _finding(error: HighwaterError) -> Finding:
    return Finding(problem=error.problem, hint=error.hint)


def _in_a_sentence(diagnosis: Diagnosis, torch_obstacle: HighwaterError | None) -> str:
    """Sentence on what works on this machine, and why the rest does not."""
    if not diagnosis.can_run:
        whys = (each.problem for each in diagnosis.findings if each.stops_every_trial)
        return f"{_QUESTIONS}, for any GPUs; {_TRIALS} do not: {', '.join(whys)}."
    gpus = diagnosis.machine.gpus
    fit = [gpu for gpu in gpus if unfit_gpu(gpu.name, gpu.compute_capability) is None]
    if fit and torch_obstacle is None:
        return f"{_QUESTIONS}, and {_TRIALS} on {counted(len(fit), 'GPU')}."
    why = "no GPU here is fit for training" if gpus else "no GPU is visible"
    why = why if torch_obstacle is None else torch_obstacle.problem
    return f"{_QUESTIONS}, for any GPUs; {_TRIALS} run on the CPU, with small models: {why}."


def _feature_table(rows: Sequence[Feature]) -> TextTable:
    """Table of features: those that work, then the others with what to install."""
    return table_of(
        "what works here, and what to install for the rest (in the checkout of highwater)",
        sorted(rows, key=lambda each: not each.works),
        ("", "what"),
        ("works", lambda each: "yes" if each.works else f"no: {plain(', '.join(each.obstacles))}"),
        ("to install", lambda each: "" if each.works else each.install),
    )


def _gpu_table(machine: Machine) -> TextTable:
    busy = busy_gpus(machine.gpus)
    return table_of(
        f"GPUs, driver {plain(machine.driver_version or '?')}",
        machine.gpus,
        ("GPU", "index"),
        ("name", "name"),
        ("state", lambda gpu: "in use" if gpu in busy else "free"),
        ("memory", "memory_total_bytes"),
        ("in use", "memory_used_bytes"),
        ("processes", lambda gpu: " ".join(map(str, gpu.processes)) or "-"),
    )


def _host_table(machine: Machine) -> TextTable:
    free, total = machine.host_memory_available_bytes, machine.host_memory_total_bytes
    rows = (
        ("CPU cores", str(machine.cpu_cores)),
        ("host memory", f"{format_bytes(free)} free of {format_bytes(total)}"),
        *((name, plain(version)) for name, version in sorted(machine.versions.items())),
    )
    return TextTable(title="machine", columns=(), rows=rows, left_columns=2)


def _measured(machine: Machine) -> tuple[Constants, ...]:
    """Measure the constants on 1, 2, 4 ... GPUs, up to all. Raises MachineError without any."""
    if not machine.gpus:
        raise MachineError(
            "no GPU is visible: there is nothing to measure", hint="leave `--measure` out"
        )
    found: list[Constants] = []
    for count in (1 << power for power in range(len(machine.gpus).bit_length())):
        console.talk(
            f"reading what libraries take on {counted_ranks(count, 'cuda')}, up to half a minute"
        )
        found.append(read_constants(count))
    return tuple(found)


def _constants_table(constants: tuple[Constants, ...]) -> TextTable:
    """Table with a row for each library, in order of use; in brackets: kept in the allocator."""
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
