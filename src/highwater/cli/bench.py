"""``highwater bench attention``: measure each attention's longest sequence on this machine."""

import argparse
import os
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from highwater.cli import console
from highwater.cli.console import exit_code_of
from highwater.errors import (
    EXIT_ANSWERED,
    EXIT_ANSWERED_NO,
    EXIT_INCONCLUSIVE,
    MachineError,
    UsageError,
)
from highwater.nouns.attention_bench import (
    DIRECTIONS,
    IMPLEMENTATIONS,
    MOST_TOKENS,
    AttentionBench,
    BenchDtype,
    BenchLine,
    BenchOrder,
    Implementation,
    implementations_named,
)
from highwater.nouns.codec import to_json
from highwater.nouns.declaration import flag_of
from highwater.nouns.hardware import OLDEST_CAPABILITY, Machine
from highwater.nouns.plan import refuse_without_kernel
from highwater.nouns.request import request_from
from highwater.nouns.settings import PATTERN_FIELDS
from highwater.nouns.sparse_pattern import WINDOWED, SparsePatternConfig, refuse_branches
from highwater.nouns.trial import Device
from highwater.pages.attention import (
    attention_markdown,
    bench_document,
    entry_words,
    longest_table,
    per_gpu,
)
from highwater.pages.text import plain
from highwater.store.directory import write_new_file
from highwater.trials.measurements import bench_lines
from highwater.trials.probe import probe, refuse_busy_gpus, refuse_unreadable_gpus
from highwater.units import (
    format_bytes,
    format_pass,
    format_seconds,
    format_tokens,
    parse_memory,
    parse_seconds,
    parse_tokens,
)

_REPORT = "attention"
"""Name of the report's files."""
_TIMEOUTS = {"cuda": 60.0, "cpu": 10.0}


def bench(arguments: argparse.Namespace) -> int:
    """Measure, print the longest lengths, and write the report; returns the exit code."""
    machine = probe()
    order = _order(arguments, machine)
    folder = _folder(arguments.out)
    heard: list[BenchLine] = []
    interrupt: KeyboardInterrupt | None = None
    began_s = time.monotonic()
    try:
        with bench_lines(order) as lines:
            for line in lines:
                heard.append(line)
                console.talk(f"{format_seconds(time.monotonic() - began_s)}: {_line_words(line)}")
    except KeyboardInterrupt as caught:
        interrupt = caught
    not_run = tuple(each.not_run for each in heard if each.not_run is not None)
    rows = tuple(each.row for each in heard if each.row is not None)
    if not rows:
        if interrupt is not None:
            console.talk("interrupted: no case had ended, and nothing of it runs any more")
            return exit_code_of(interrupt)
        reasons = "; ".join(f"{each.implementation}: {each.reason}" for each in not_run)
        raise UsageError(
            f"nothing that is named runs here: {reasons}", hint="add `--implementations dense`"
        )
    found = AttentionBench(
        made_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=arguments.command_line,
        order=order,
        machine=next(each.machine for each in heard if each.machine is not None),
        checks=tuple(each.check for each in heard if each.check is not None),
        rows=rows,
        not_run=not_run,
        is_whole=interrupt is None,
    )
    document = bench_document(found)
    for suffix, text in (("json", to_json(document, indent=2)), ("md", attention_markdown(found))):
        write_new_file(folder / f"{_REPORT}.{suffix}", f"{text}\n".encode(), flag="--out")
    if arguments.json:
        console.answer_json(document)
    else:
        console.answer_table(longest_table(found, document.summary))
    console.talk(f"the report: {folder / f'{_REPORT}.md'}, and .json beside it")
    if interrupt is not None:
        console.talk("interrupted: what had ended is in the report, nothing runs any more")
        return exit_code_of(interrupt)
    if not arguments.json:
        # next: the same on two GPUs, if there are two; else heads as another model has them
        has_two = order.gpus == 1 and (order.device == "cpu" or len(machine.gpus) > 1)
        more = "--gpus 2" if has_two else "--heads 32 --kv-heads 8 --head-dim 128"
        console.next_command(f"highwater bench attention --device {order.device} {more}")
    if any(row.result in ("red", "crashed") for row in rows):
        return EXIT_INCONCLUSIVE
    return EXIT_ANSWERED if any(row.fits for row in rows) else EXIT_ANSWERED_NO


def _line_words(line: BenchLine) -> str:
    if line.machine is not None:
        return f"{plain(line.machine.device_name)}, dense attention on {line.machine.kernel}"
    if line.check is not None:
        verdict = plain(line.check.reason) or "equals the reference, forward and all gradients"
        return f"{line.check.implementation}: {verdict}"
    if line.not_run is not None:
        return f"{line.not_run.implementation}: not run: {plain(line.not_run.reason)}"
    row = line.row
    if row is None or row.result == "red":
        return "nothing of it is measured"
    batch = "" if row.batch == 1 else f" x {row.batch}"
    how = row.result
    if row.fits:
        how += f" in {format_pass(row.time_s)}, {per_gpu(row.peak_allocated_bytes)} at the peak"
    return f"{entry_words(row.entry)}: {format_tokens(row.length_tokens)} tokens{batch}: {how}"


def _order(arguments: argparse.Namespace, machine: Machine) -> BenchOrder:
    """The benchmark as typed, with this machine's defaults. Raises UsageError or MachineError."""
    given = {name: getattr(arguments, name) for name in PATTERN_FIELDS}
    typed = {name: value for name, value in given.items() if value is not None}
    names = implementations_named(arguments.implementations, has_pattern=bool(typed))
    device = _device(arguments, machine)
    for name in ("gpus", "heads", "kv_heads", "head_dim"):
        count = getattr(arguments, name)
        if count is not None and count < 1:
            flag = flag_of(name)
            raise UsageError(f"{flag} {count}", hint=f"use 1 or more, for example `{flag} 2`")
    lengths = tuple(map(parse_tokens, arguments.lengths or ()))
    longest = max(lengths, default=0)
    most = max(longest, MOST_TOKENS[device])
    if arguments.max_length is not None:
        most = parse_tokens(arguments.max_length)
    if longest > most:
        raise UsageError(
            f"--lengths names {format_tokens(longest)} tokens, and --max-length "
            f"{format_tokens(most)}",
            hint=f"use `--max-length {longest}`, or leave it out",
        )
    order = BenchOrder(
        device=device,
        implementations=names,
        directions=DIRECTIONS if arguments.only is None else (arguments.only,),
        gpus=arguments.gpus,
        memory_bytes=_memory_bytes(arguments, device, machine),
        heads=arguments.heads,
        kv_heads=arguments.kv_heads or arguments.heads,
        head_dim=arguments.head_dim,
        dtype=bench_dtype(arguments.dtype, device, machine),
        same_qkv=arguments.same_qkv,
        patterns=_patterns(typed, names, device),
        **_branches(arguments, names),
        lengths=lengths,
        most_tokens=most,
        timeout_s=parse_seconds(arguments.timeout) if arguments.timeout else _TIMEOUTS[device],
        threads=max(1, len(os.sched_getaffinity(0)) // arguments.gpus),
    )
    if order.heads % order.kv_heads:
        raise UsageError(
            f"{order.kv_heads} key/value heads do not divide {order.heads} query heads",
            hint=f"use `--kv-heads {order.heads}`",
        )
    if order.same_qkv and order.kv_heads != order.heads:
        raise UsageError(
            f"one tensor is {order.heads} query heads and {order.kv_heads} key/value heads at once",
            hint="leave `--kv-heads` out, or `--same-qkv`",
        )
    return order


def _patterns(
    typed: dict[str, str], names: Sequence[str], device: Device
) -> dict[str, SparsePatternConfig]:
    """The pattern of each named implementation that takes patterns, with the typed fields. Raises
    UsageError for patterns that training refuses, and if no named implementation takes patterns.
    """
    if not typed:
        return {}
    request = request_from({"model": "tiny", "attention": "block_sparse", **typed})
    settings = request.settings
    if settings.pattern_type == "block_top_k":
        raise UsageError(
            "block_top_k keeps keys by what is in them, and a benchmark's are random numbers",
            hint="use `--pattern-type dilated_sparse`",
        )
    if device == "cuda":
        refuse_without_kernel(request)
    asked = {name: getattr(settings, name) for name in typed}
    if settings.pattern_type in WINDOWED:
        asked["sparsity_ratio"] = None
    return {
        name: each.pattern.replace(**asked)
        for name, each in _taking("takes_pattern", typed, names).items()
        if each.pattern is not None
    }


def _branches(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The typed segments and rates, as fields of ``BenchOrder``. Raises UsageError if invalid."""
    typed = [name for name in ("segment_lengths", "dilation_rates") if getattr(arguments, name)]
    if not typed:
        return {}
    _taking("takes_segments", typed, names)
    lengths = tuple(map(parse_tokens, arguments.segment_lengths or ()))
    rates = tuple(arguments.dilation_rates or (1 << number for number in range(len(lengths))))
    refuse_branches(lengths or (1, 2), rates)
    return {"segment_lengths": lengths, "dilation_rates": rates}


def _taking(flags: str, typed: Collection[str], names: Sequence[str]) -> dict[str, Implementation]:
    """Named implementations whose field ``flags`` is true. Raises UsageError if there are none."""
    every = {name: each for name, each in IMPLEMENTATIONS.items() if getattr(each, flags)}
    found = {name: each for name, each in every.items() if name in names}
    if not found:
        raise UsageError(
            f"{', '.join(map(flag_of, typed))}: none of {', '.join(names)} takes that",
            hint=f"use `--implementations {next(iter(every))}`",
        )
    return found


def _device(arguments: argparse.Namespace, machine: Machine) -> Device:
    if arguments.device == "cpu":
        return "cpu"
    if not machine.gpus:
        named = "`--device cuda` is asked for" if arguments.device else "the CPU is not named"
        raise UsageError(f"no GPU is visible, and {named}", hint="use `--device cpu`")
    if arguments.gpus > len(machine.gpus):
        raise MachineError(
            f"{arguments.gpus} GPUs are asked for, and {len(machine.gpus)} visible",
            hint=f"use `--gpus {len(machine.gpus)}`",
        )
    if not arguments.allow_busy:
        refuse_unreadable_gpus(machine, count=arguments.gpus)
        refuse_busy_gpus(machine, count=arguments.gpus)
    return "cuda"


def _memory_bytes(arguments: argparse.Namespace, device: Device, machine: Machine) -> int | None:
    has, what = machine.host_memory_available_bytes // arguments.gpus, "free for each process"
    if device == "cuda":
        has = min(gpu.memory_total_bytes for gpu in machine.gpus[: arguments.gpus])
        what = "on a GPU"
    if arguments.memory is None:
        return None if device == "cuda" else has
    asked = parse_memory(arguments.memory)
    if asked > has:
        raise UsageError(
            f"this machine has {format_bytes(has)} {what}, and {format_bytes(asked)} is asked for",
            hint=f"use `--memory {has * 3 // 4 >> 20}MiB`, or leave it out",
        )
    return asked


def bench_dtype(named: BenchDtype | None, device: Device, machine: Machine) -> BenchDtype:
    """The dtype to compute in: ``named``, else the GPUs' fastest. Raises MachineError for bf16."""
    if device == "cpu":
        return named or "fp32"
    oldest = min(machine.gpus, key=lambda gpu: gpu.compute_capability)
    has_bf16 = oldest.compute_capability >= OLDEST_CAPABILITY
    if named == "bf16" and not has_bf16:
        raise MachineError(f"{oldest.name} has no bf16", hint="use `--dtype fp16`")
    return named or ("bf16" if has_bf16 else "fp16")


def _folder(named: str | None) -> Path:
    """Make the report's folder; UsageError if it has a report, or cannot be written."""
    parent = Path("logs", _REPORT)
    folder = parent / f"{datetime.now():%Y%m%d-%H%M%S}" if named is None else Path(named)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "has a report already" if (folder / f"{_REPORT}.json").exists() else ""
        TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        why = f"cannot be written: {error.strerror if isinstance(error, OSError) else error}"
    if why:
        raise UsageError(f"{folder} {why}", hint=f"name another: `--out {parent / 'another'}`")
    return folder
