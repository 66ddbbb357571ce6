"""``search_context_length_capacity``: the command line that Trinity-RFT users know, answered by
this project's trials.

The same flags, defaults, log tree and line per cell, and a few more: ``--memory``, ``--method``,
``--config``, ``--data``. ``--dlc`` joins the running Ray cluster, as the original does. Without a
visible GPU, a small model is searched on the CPU, under a memory limit that stands in for a GPU's.
Source: Trinity-RFT, scripts/context_length_test/search_context_length_capacity.py.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from highwater.api import search
from highwater.cli import console
from highwater.cli.app import guarded
from highwater.cli.commands import exit_code, say_interrupted, say_line, with_memory
from highwater.cli.config import as_key, settings_in
from highwater.cli.console import exit_code_of
from highwater.cli.flags import layered
from highwater.cli.grammar import PUBLISHED, Parser, parse_strictly
from highwater.cli.progress import Progress
from highwater.errors import HighwaterError, MachineError
from highwater.model.model import STATE_BYTES_PER_PARAMETER, Model, load_model
from highwater.nouns.codec import packaged
from highwater.nouns.declaration import SWITCH
from highwater.nouns.environment import ALLOCATOR_MODES, allocator_options, ignored_options
from highwater.nouns.hardware import Machine
from highwater.nouns.plan import LONGEST_TOKENS, Plan, grid_of
from highwater.nouns.request import DECLARED, Request, request_from, values_of
from highwater.nouns.settings import RUNG_ROWS, Allocator, Settings
from highwater.nouns.trial_hardware import cpu_memory
from highwater.search.cell_outcomes import CellAnswered, SearchEvent
from highwater.trials.probe import probe
from highwater.units import format_bytes, format_tokens

_MICRO_BATCHES = 4
_SEQUENCES_PER_MICRO_BATCH = 2
"""Trinity's trial: 8 sequences per data-parallel rank, in 4 micro-batches of 2 packed sequences."""
_START_TOKENS = 4096
_CPU_STEP_TOKENS = 128
"""First length on the CPU, and the step between lengths, where no start length is named."""
_CPU_LOGITS_PER_CORE = 24_000_000
"""Logits of the longest sequence on the CPU, for each core: they take most of a trial's time. Three
cells of a small model with a large vocabulary then take about a minute."""
_NO_CEILING = "16m"
"""Longest length of a search on GPUs: the published scan has no ceiling."""
_DLC_NOTE = (
    "the allocator's variable goes with each trial to its node: it need not be set before the "
    "cluster starts"
)
_IN_A_JOB = (
    "for all of them `ray start --head` on the first, and on each other the `ray start --address` "
    "that this prints"
)
_FLAGS_HERE = packaged(
    "cli/published_flags.json", dict[str, tuple[str | None, str, dict[str, Any]]]
)
"""The script's flags: the request's setting that each sets, its help, argparse's options for it."""
_FIELDS = {flag: field for flag, (field, *_) in _FLAGS_HERE.items() if field is not None}
_FLAG_OF = {field: flag for flag, field in _FIELDS.items()}
_SWITCHES = {"entropy": "chunked", "offload": "true", "runner": "ray"}
"""Settings that a flag without a value sets here, and the value that it stands for."""
_FLAGS = re.compile(r"(leave )?`(--\w[^`]*)`( out\b)?")
_LEFT_OUT = (
    (re.compile(r"leave (`--[^`]*`) (or|and) (`--[^`]*`) out"), r"leave \1 out \2 leave \3 out"),
    (re.compile(r"(leave `--[^`]*` out), or (`--[\w-]+`)"), r"\1, or leave \2 out"),
)
"""Phrases that leave out two settings, and what replaces each: a phrase for each setting."""
_RING = re.compile(r"`--ulysses \d+ --ring (?!1`)\d+`(?:, | or )| --ring 1(?=[ `])")
"""Advice about a ring, which the original lacks: it is removed from texts."""
_OF_A_RUNG = {row.name: row.default for row in RUNG_ROWS.values()}
_USUAL = Request(model=".")
_IN_THE_FILE = " in the file of `--config`"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command with these words (default: the command line's); returns its exit code."""
    return guarded(_run, sys.argv[1:] if words is None else words)


def _run(words: Sequence[str]) -> int:
    arguments, typed = parse(words), typed_in(words)
    from_file: dict[str, Any] = {}
    try:
        model, machine = load_model(arguments.model_path), _machine(arguments)
        from_file = settings_in(arguments.config, arguments.model_path)
        return _search(words, arguments, model, machine, from_file)
    except HighwaterError as error:
        error.problem = in_these_words(error.problem, typed, from_file, where="")
        error.hint = in_these_words(error.hint, typed, from_file)
        raise


def _search(
    words: Sequence[str],
    arguments: argparse.Namespace,
    model: Model,
    machine: Machine,
    from_file: Mapping[str, Any],
) -> int:
    typed = typed_in(words)
    asked = request_of(arguments, settings_of(arguments, {}), {}, typed, from_file)
    starts = "start_length" in {*typed, *from_file}
    place = place_of(model, machine, asked, starts=starts)
    settings = settings_of(arguments, os.environ if place["device"] == "cuda" else {})
    request = request_of(arguments, settings, place, typed, from_file)
    planned = search.prepare(request).replace(begins_shortest=starts)
    device = planned.question.device
    unbound = place | ({} if starts or device == "cuda" else {"max_length": LONGEST_TOKENS["cpu"]})
    started = request_of(arguments, settings, unbound, typed, from_file)
    longest_tokens = grid_of(started, model, device)[0].max_tokens
    here = partial(in_these_words, typed=typed, from_file=from_file)
    console.notes([*map(here, _notes(arguments, planned, longest_tokens))])
    try:
        study = search.answer(
            request,
            planned,
            on_event=_listener(planned, here),
            log_layout="published",
            command=with_memory((PUBLISHED, *words), request, planned.question.memory_budget_bytes),
        )
    except KeyboardInterrupt as interrupt:
        say_interrupted(search.study_file(request, planned.question))
        return exit_code_of(interrupt)
    if study.path is not None:
        console.next_command(f"highwater show {shlex.quote(study.path)} --as published")
    return exit_code(study, has_budget=planned.budget_s is not None)


def _notes(arguments: argparse.Namespace, planned: Plan, longest_tokens: int) -> tuple[str, ...]:
    """Notes on differences from the original script on this machine, and the plan's own notes."""
    question = planned.question
    goes_on = longest_tokens > question.grid.max_tokens and not planned.begins_shortest
    on_the_cpu = (
        f"trials run on the CPU: {format_bytes(question.memory_budget_bytes)} of host memory for "
        f"each process stand in for a GPU, and lengths end at "
        f"{format_tokens(question.grid.max_tokens)} tokens"
        + (f"; `--start_length 512` goes on to {format_tokens(longest_tokens)}" if goes_on else ""),
    )
    return (
        *(on_the_cpu if question.device == "cpu" else ()),
        f"each trial saves in a directory of its own below {arguments.checkpoint_path}, which "
        f"goes with it: nothing else there is touched",
        *((_DLC_NOTE,) if arguments.dlc else ()),
        *ignored_options(os.environ, question.device, reads_mode=True),
        *planned.notes,
    )


def _listener(planned: Plan, here: Callable[[str], str]) -> Callable[[SearchEvent], None]:
    """Return a function that prints each event to stderr, and each answered cell to stdout."""
    question = planned.question
    progress = Progress(question, planned.timeout_s)

    def hear(event: SearchEvent) -> None:
        progress.hear(event)
        line = progress.sparse_line(event)
        if line:
            console.talk(here(line))
        if isinstance(event, CellAnswered):
            reason = here(event.answer.reason)
            answer = event.answer.replace(reason=reason)
            say_line(question, answer.cell, answer)

    return hear


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words with the original's defaults; UsageError for an unknown flag."""
    return parse_strictly(grammar(), words)


def typed_in(words: Sequence[str]) -> frozenset[str]:
    """The names of the flags that were typed in ``words``."""
    blank = argparse.Namespace(**dict.fromkeys(vars(parse(words))))
    grammar().parse_args(words, blank)
    return frozenset(name for name, value in vars(blank).items() if value is not None)


def settings_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """The settings that flags name; the environment names the allocator, as the guide's "Env"."""
    expandable = ALLOCATOR_MODES["expandable"].lower() in map(
        str.lower, allocator_options(environment)
    )
    allocator: Allocator = "expandable" if expandable else "native"
    return Settings(
        strategy=arguments.trainer_strategy,
        allocator=allocator,
        objective="grpo",
        entropy="chunked" if arguments.entropy_saving else "full",
        offload=arguments.offload,
        sequences_per_micro_batch=_SEQUENCES_PER_MICRO_BATCH,
        save_hf=arguments.save_hf_checkpoint,
        checkpoint="sharded",
    )


def place_of(
    model: Model, machine: Machine, asked: Request, *, starts: bool = False
) -> dict[str, str | int]:
    """Device and lengths, as settings of a request: GPUs; or, for a small model on a machine
    without GPUs, the CPU, with short lengths close together unless a start was typed (``starts``).
    """
    room_bytes = asked.memory_bytes or cpu_memory(asked, machine)
    small = STATE_BYTES_PER_PARAMETER * model.shape.parameters <= room_bytes // 4
    usual = "cuda" if machine.gpus or machine.unreadable_gpus or not small else "cpu"
    if (asked.device or usual) == "cuda":
        return {"device": "cuda", "max_length": _NO_CEILING}
    if starts:
        start, longest = asked.start_tokens, max(LONGEST_TOKENS["cpu"], asked.start_tokens)
    else:
        start, tokens = _CPU_STEP_TOKENS, _CPU_LOGITS_PER_CORE // model.shape.vocab_size
        longest = max(2, machine.cpu_cores * tokens // start) * start
        longest = min(longest, LONGEST_TOKENS["cpu"])
    step = min(start, _START_TOKENS)
    return {"device": "cpu", "start_length": start, "max_length": longest, "resolution": step}


def request_of(
    arguments: argparse.Namespace,
    settings: Settings,
    place: Mapping[str, str | int],
    typed: Collection[str] = (),
    from_file: Mapping[str, Any] | None = None,
) -> Request:
    """The search request of these flags. A file's settings override flags that were not typed. YaRN
    scales past the native length, whatever RoPE scaling the model has.
    """
    values: dict[str, Any] = {
        **{field: getattr(arguments, flag) for flag, field in _FIELDS.items()},
        "runner": "ray" if arguments.dlc else None,
        **values_of(settings),
        "rope": "yarn",
        "micro_batches": _MICRO_BATCHES,
        **place,
    }
    named = {_FIELDS[flag]: values.pop(_FIELDS[flag]) for flag in _FIELDS if flag in typed}
    return layered(values, from_file or {}, named)


def _machine(arguments: argparse.Namespace) -> Machine:
    """This machine, or with ``--dlc`` a node of the cluster. Raises MachineError if it has none."""
    if not arguments.dlc:
        return probe()
    try:
        request = request_from({"model": arguments.model_path, "runner": "ray"})
        return search.where_trials_run(request)[0]
    except MachineError as error:
        raise MachineError(
            f"--dlc joins the Ray cluster of the job: {error.problem}",
            hint=f"`{_command(arguments, dlc=False)}` takes one machine of the job; {_IN_A_JOB}",
        ) from error


def _command(arguments: argparse.Namespace, **replaced: Any) -> str:
    """The command line of these arguments with some replaced; defaults are left out."""
    values = vars(arguments) | replaced
    defaults = vars(grammar().parse_args([f"--model_path={arguments.model_path}"]))
    words = [PUBLISHED, *_spelled("model_path", arguments.model_path)]
    for name, value in values.items():
        if value != defaults[name]:
            words += (
                [f"--{name}", *map(str, value)]
                if isinstance(value, list)
                else _spelled(name, value)
            )
    return shlex.join(words)


def _spelled(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"]
    return [f"--{name}={value}"] if str(value).startswith("-") else [f"--{name}", str(value)]


def in_these_words(
    text: str,
    typed: Collection[str] = (),
    from_file: Collection[str] = (),
    *,
    where: str = _IN_THE_FILE,
) -> str:
    """Replace ``highwater find``'s flags in a text by this script's, or by keys of a configuration
    file if the script has no such flag. ``typed``: the script's flags that were typed, which no
    file overrides; ``from_file``: keys of the configuration file.
    """
    if "ring" not in from_file:
        text = _RING.sub("", text)
    for several, each in _LEFT_OUT:
        text = several.sub(each, text)
    return _FLAGS.sub(lambda found: _said_here(found, typed, where), text)


def _said_here(found: re.Match[str], typed: Collection[str], where: str) -> str:
    """Replacement for flags that a text names, or says to leave out. A flag to leave out that was
    not typed is set to its usual value in a file, as the script's own default may differ.
    """
    leave, words, out = found.groups(default="")
    is_left_out = bool(leave and out)
    flags: list[str] = []
    keys: list[str] = []
    without = ""
    for typed_name, values in _named_in(words):
        name = typed_name.replace("-", "_")
        row, flag = DECLARED.get(name), _FLAG_OF.get(name)
        switched = _SWITCHES.get(name)
        if row is None or (is_left_out and flag in typed):
            flags += [f"--{flag or typed_name}", *map(str, values)]
        elif is_left_out:
            usual = getattr(_USUAL, name)
            keys.append(as_key(name, _OF_A_RUNG.get(name) if usual is None else usual))
        elif flag and (not values or switched in (None, *values)):
            flags += [f"--{flag}", *(map(str, values) if switched is None else ())]
        else:
            is_switch = row.kind is SWITCH or row.stands_alone
            value = values[0] if len(values) == 1 else values or is_switch
            keys.append(as_key(name, value) if value is not False else name)
            without += f", without `--{flag}`" if flag in typed else ""
    if is_left_out and keys:
        leave, out = "use ", ""
    told = " and ".join(f"`{each}`" for each in (*filter(None, [shlex.join(flags)]), *keys))
    return f"{leave}{told}{where if keys else ''}{without}{out}"


def _named_in(words: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of each flag in the text, and its values."""
    for each in words.removeprefix("--").split(" --"):
        flag, *values = shlex.split(each)
        name, is_joined, value = flag.partition("=")
        values = [value] if is_joined else values
        yield name, [int(v) if v.isdecimal() else v for v in values]


def grammar() -> Parser:
    """The flags of the published script."""
    parser = Parser(
        prog=PUBLISHED,
        examples=(
            f"{PUBLISHED} --model_path examples/tiny --test_gpu_num 1 2 --test_sp_num 1 2",
            f"{PUBLISHED} --model_path Qwen3-0.6B --trainer_strategy fsdp2",
            f"{PUBLISHED} --model_path Qwen3-0.6B --test_gpu_num 1 --start_length 32768",
            f"{PUBLISHED} --model_path Qwen3-8B --test_gpu_num 4 --test_sp_num 1 2 4 --offload",
        ),
        description="The longest context that a model trains with, for each number of GPUs and "
        "each SP.",
    )
    for flag, (_, help_, options) in _FLAGS_HERE.items():
        counts: dict[str, Any] = {"type": int} if "nargs" in options else {}
        parser.add_argument(f"--{flag}", help=help_, **options, **counts)
    saved = os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR", "./checkpoints/length-test")
    parser.set_defaults(checkpoint_path=saved)
    return parser


if __name__ == "__main__":
    sys.exit(main())
