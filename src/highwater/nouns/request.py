"""Request: a user's settings, from flags of ``find``, a ``--config`` file or Python keywords."""

import re
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from highwater.errors import UsageError
from highwater.nouns import declaration as kinds
from highwater.nouns.cluster import card_memory, cluster, kind_by_number
from highwater.nouns.declaration import (
    IN_A_STEP,
    KEYWORDS,
    MOST_GPUS,
    MOST_NAMED,
    NUMBER,
    PAPER,
    PREDICTING_COMMANDS,
    REQUIRED,
    SHARE,
    SWITCH,
    TRAINED,
    TRIAL_COMMANDS,
    TYPED,
    CommandName,
    DeclaredRecord,
    RefusedError,
    Setting,
    Spelling,
    Topic,
    choices_of,
    in_file,
    meant_word,
    nearest,
    setting,
    word_hint,
    words_of,
)
from highwater.nouns.environment import SETTING, Profiling, loose_profiling
from highwater.nouns.hyperparameters import DEFAULTS, Hyperparameters, out_of_range
from highwater.nouns.layout import Device
from highwater.nouns.objective import TRAITS, RolloutRequest
from highwater.nouns.settings import RUNG_ROWS, Activations, Allocator, Loss, Offload, Settings
from highwater.nouns.study import Cell, Method, Proof
from highwater.nouns.trainer import (
    BY_COMMAND,
    FOREIGN,
    IN_PLACE,
    PAGE,
    ForeignName,
    TriedTrainer,
    foreign_name,
    refuse_inexpressible,
)
from highwater.units import (
    MIB,
    format_bytes,
    parse_bytes,
    parse_memory,
    parse_seconds,
    parse_tokens,
)

PACKINGS = ("sequences_per_micro_batch", "token_budget")
"""Settings that say how many sequences a micro-batch has: at most one of them is named."""

_USUAL_TIMEOUT_S = 40 * 60.0
_SMALLEST_MEMORY_BYTES = 64 * MIB
"""Least memory that may be named: less than any trial needs."""
_OF_THE_LADDER = ("allocator", "loss")
"""Fields of ``Settings`` that differ by rung; a request that names one keeps its rungs."""
_EVERY_SETTING = "`highwater schema` lists every setting"
_RUNG = Settings()

RunnerName = Literal["local", "ray"]
"""Where trials run: on this machine, or on a Ray cluster."""
Size = str | int
Tokens = str | int
Time = str | int | float


_LENGTHS: dict[str, Any] = {
    "kind": kinds.LENGTH,
    "topic": "lengths",
    "commands": ("find", "predict"),
}
_SEARCH: dict[str, Any] = {"topic": "search", "commands": ("find",)}
_MACHINES: dict[str, Any] = {"topic": "machines", "commands": ("find", "train")}


class _FirstFields(DeclaredRecord, frozen=True, kw_only=True):
    """First fields of a request: a model, who trains it, and on which GPUs."""

    model: str = kinds.MODEL(
        REQUIRED,
        "directory of a Hugging Face model, its id on the Hub such as Qwen/Qwen2.5-7B, or a "
        "catalog name such as Qwen3-0.6B",
        topic="model",
        nargs="?",
    )
    trainer: TriedTrainer = setting(
        "highwater",
        "what is tried: this package's engine, or a trainer that is started from outside",
        commands=TRIAL_COMMANDS,
        any_other="command",
    )
    command: str | None = kinds.COMMAND(
        None,
        "--trainer command: what starts it, with {length} and other values of the trial in its "
        "words; no shell runs it. --trainer accelerate: the script that it launches, likewise. "
        "any other trainer: the program, where it is not its own name in PATH",
        TRIAL_COMMANDS,
    )
    trainer_config: str | None = kinds.FILE(
        None,
        "configuration of the trainer, your own, whose other fields stay",
        (*PREDICTING_COMMANDS, "recommend"),
        helps=dict.fromkeys(
            ("predict", "recommend"),
            "configuration of the trainer, your own, that says what is trained",
        ),
        example="base.yaml",
    )
    done_pattern: str | None = kinds.PATTERN(
        None,
        "what in the trainer's log shows that the steps are done, with a group `step` for "
        "their number; '': exit status 0 does; default: the usual progress lines",
        TRIAL_COMMANDS,
    )
    gpus: tuple[int, ...] | None = kinds.COUNTS(
        None,
        "GPU counts to search; default: the powers of two up to those present",
        TRAINED,
        helps={"train": "how many GPUs train; default: all that are here; on the CPU processes"},
    )
    ulysses: tuple[int, ...] | None = kinds.COUNTS(
        None,
        "Ulysses degrees: GPUs that share one sequence",
        defaults={
            **dict.fromkeys(PAPER, "every degree that divides GPUs and heads"),
            **dict.fromkeys(("try", "train"), "1"),
            "find": "those of the simplest and of the longest settings",
        },
    )
    ring: tuple[int, ...] = kinds.COUNTS(
        (1,),
        "ring degrees: GPUs, or groups of --ulysses GPUs, that share one sequence by passing "
        "keys and values on",
        defaults=dict.fromkeys(PAPER, "1; `--trainer trl`: every one that divides GPUs"),
    )
    copies: tuple[int, ...] | None = kinds.COUNTS(
        None,
        "copies of what FSDP2 shards, each among GPUs / copies; with as many as machines, the "
        "network between them carries gradients alone; default: 1, of a model in nf4 by "
        "another trainer one a GPU",
    )
    memory: Size | None = kinds.SIZE(
        None,
        "bound on the memory of each GPU, for example 79.15GiB; on the CPU of each process",
        TRAINED,
        sets="memory_bytes",
    )
    host_memory: Size | None = kinds.SIZE(
        None,
        "a machine's memory, of which nothing takes more; default: this machine's, or what "
        "machines with such GPUs usually have",
        (*IN_A_STEP, "train"),
        sets="host_memory_bytes",
        example="512GiB",
    )
    loss: Loss | None = None
    allocator: Allocator | None = None
    offload: Offload | None = None
    activations: Activations | Literal["auto"] | None = None
    sequences_per_micro_batch: int | None = None
    learning_rate: float | None = None


_IN_OTHER_WORDS = {row.sets: row.name for row in RUNG_ROWS.values() if row.name != row.sets}
"""Fields of ``Settings`` that a request names otherwise: ``accumulates`` as ``micro_batches``."""
if TYPE_CHECKING:
    _WithSettings = _FirstFields
else:
    _WithSettings = msgspec.defstruct(
        "_WithSettings",
        [
            (each.name, each.type, each.default)
            for noun in (Settings, Hyperparameters, RolloutRequest)
            for each in msgspec.structs.fields(noun)
            if each.name not in {*_FirstFields.__struct_fields__, *_IN_OTHER_WORDS}
        ],
        bases=(_FirstFields,),
        frozen=True,
        kw_only=True,
    )


class Request(_WithSettings, frozen=True, kw_only=True):
    """A search for the longest context that trains: sizes "80GiB", lengths "32k", times "40m"."""

    # It has every field of Settings, of Hyperparameters and of RolloutRequest, too: read them as
    # `settings`, `hyperparameters` and `rollout_request`

    token_budget: Tokens | None = None
    timeout: Time | None = kinds.TIME(
        None,
        "longest time for one trial; default: 40m, or its share of the budget",
        TRIAL_COMMANDS,
        sets="timeout_s",
    )
    steps: int = kinds.COUNT(2, "optimizer steps of a trial, 2 or more", TRIAL_COMMANDS, example=2)
    micro_batches: int = 2
    prompt_tokens: int | None = kinds.COUNT(
        None,
        "first tokens of a sequence that are its prompt, and not trained, half of it at the "
        "most: the full loss makes no logits of them; default: 0, or a `--study`'s own",
        IN_A_STEP,
        example=2048,
    )
    data: str | None = kinds.FUNCTION(
        None,
        "module:function that yields token batches: code of yours, which is run; default: "
        "synthetic ones",
        TRIAL_COMMANDS,
    )
    device: Device | None = setting(
        None, "what to train on; default: cuda where there is a GPU", commands=TRAINED
    )
    runner: RunnerName | None = setting(
        None,
        "where trials run: local, on this machine; ray, on the nodes of a running Ray cluster; "
        "default: local, and ray with --address",
        commands=TRIAL_COMMANDS,
    )
    address: str | None = kinds.ADDRESS(
        None,
        "the Ray cluster to join, from one of its machines; default: RAY_ADDRESS, or the one "
        "that runs here",
        TRIAL_COMMANDS,
    )
    log_dir: str = kinds.DIRECTORY("./logs", "directory of logs and studies", TRIAL_COMMANDS)
    checkpoint_dir: str | None = kinds.DIRECTORY(
        None,
        "directory below which trials save what they save; default: under the log directory",
        TRIAL_COMMANDS,
        example="./checkpoints",
    )
    memory_profiler: Profiling | None = kinds.STEPS(
        None,
        "steps whose memory is recorded, from 0: a snapshot of each rank beside the log, for "
        "`highwater profile PATH`; a file may name profile_steps, max_entries and ranks",
        TRAINED,
    )
    logit_range: bool = SWITCH(
        False,
        "smallest and largest logit among the statistics, and each token's on average: one "
        "more pass over the logits",
        TRAINED,
    )
    allow_busy: bool = SWITCH(False, "also start on GPUs that somebody else uses", TRAINED)
    dry_run: bool = SWITCH(False, "answer from a memory law; nothing is trained", TRIAL_COMMANDS)
    attention_depth: int | None = kinds.COUNT(
        None,
        "memory-only trial: attention over whole documents in the last N layers alone, on "
        "short pieces elsewhere",
        ("try",),
    )
    start_length: Tokens = setting(
        4096, "shortest length to try, in tokens", sets="start_tokens", **_LENGTHS
    )
    resolution: Tokens | None = setting(
        None,
        "step between lengths; default: 4096; of trials past the native length a quarter of it",
        sets="resolution_tokens",
        **_LENGTHS,
    )
    max_length: Tokens | None = setting(
        None,
        "longest length to try; default: 1m tokens, on the CPU 8k",
        example="256k",
        sets="max_tokens",
        **_LENGTHS,
    )
    method: Method = setting("bisect", "bisect, or linear: the published upward scan", **_SEARCH)
    proof: Proof | None = setting(
        None,
        "memory: a memory-only trial proves what fits where a full one would exceed the "
        "timeout; full: no trial but in full; default: memory on GPUs, and full where only "
        "--timeout is named",
        **_SEARCH,
    )
    budget: Time | None = kinds.TIME(
        None,
        "longest time for the search, which the same command goes on with; default: 15m for "
        "each layout, and no end where --proof or --timeout is named",
        sets="budget_s",
        example="2h",
        **_SEARCH,
    )
    prediction: str = kinds.PREDICTION(
        "formula",
        "which length is tried first: by formula, by trace, or by a file of `highwater predict "
        "--json`",
        **_SEARCH,
    )
    confirm: int = kinds.COUNT(
        0, "times that both trials of the edge are repeated", metavar="K", example=2, **_SEARCH
    )
    headroom: Size | None = kinds.SIZE(
        None,
        "headroom that a length must leave to count, for example 2GiB",
        ("find", "predict", "recommend", "emit"),
        topic="search",
        sets="margin_bytes",
        example="2GiB",
    )
    study: str | None = kinds.FILE(
        None,
        "file of the study; default: one for each question, under the log directory",
        **_SEARCH,
    )
    no_diagnose: bool = SWITCH(
        False,
        "do not repeat the first out of memory, after the answer, with its memory recorded",
        **_SEARCH,
    )
    retry_crashed: bool = SWITCH(
        False, "launch again what only crashed when the study was last searched", **_SEARCH
    )
    max_concurrent_trials: int | None = kinds.COUNT(
        None,
        "trials that run at a time; default: as many as the GPUs hold, and one on the CPU",
        ("find",),
        topic="machines",
        example=1,
    )
    nodes: int = kinds.COUNT(
        1,
        "machines that each trial runs on, or a training; all their GPUs share the states, unless "
        "--copies says otherwise",
        example=2,
        **_MACHINES,
    )
    launcher: str | None = kinds.COMMAND(
        None,
        "command that starts one process on each of the machines, `srun` for example; it is "
        "split into words, and no shell sees it",
        example="srun --nodes 2 --ntasks-per-node 1 --kill-on-bad-exit",
        **_MACHINES,
    )
    rendezvous: str | None = kinds.FILE(
        None,
        "file through which the ranks of several machines meet, on a file system that all of "
        "them see, in a folder that is yours alone, which is made; default: the port that the "
        "launcher names in MASTER_ADDR",
        example="./logs/rendezvous-1/ranks",
        **_MACHINES,
    )

    def __post_init__(self) -> None:
        """Raise UsageError for values that cannot work, whatever the model and the machine."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and (
                "\0" in value or any("\ud800" <= character <= "\udfff" for character in value)
            ):
                raise RefusedError(
                    name,
                    f"{name} {value!r} is no text that a file could be called",
                    hint="leave such characters out",
                )
        for row in DECLARED.values():
            try:
                getattr(self, row.sets)  # a size, a length or a time that can be read
            except UsageError as error:
                raise RefusedError(row.name, error.problem, hint=error.hint) from error
        for name, default in DEFAULTS.items():
            value = getattr(self, name)
            why = None if value is None else out_of_range(name, value)
            if why is not None:
                raise RefusedError(name, why, hint="for example `{}`", example=default)
        for name in ("gpus", "ulysses", "ring", "copies"):
            counts: tuple[int, ...] | None = getattr(self, name)
            if counts is None:
                continue
            if not counts or min(counts) < 1:
                problem = f"{name} is {' '.join(map(str, counts)) or 'empty'}"
                hint = "use 1 or more, for example `{}`"
                raise RefusedError(name, problem, hint=hint, example=[1])
            if max(counts) > MOST_GPUS:
                problem = f"{name} is {max(counts)}, and {MOST_GPUS} is the most"
                raise RefusedError(name, problem, hint="use `{}` or fewer", example=[MOST_GPUS])
            if len(counts) > MOST_NAMED:
                problem = f"{name} names {len(counts)} numbers, and {MOST_NAMED} is the most"
                hint = "name fewer, for example `{}`"
                raise RefusedError(name, problem, hint=hint, example=[1, 2, 4, 8])
        for name, least in (("max_concurrent_trials", 1), ("nodes", 1), ("prompt_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                hint = f"use {least} or more, for example `{{}}`"
                raise RefusedError(name, f"{name} is {value}", hint=hint, example=least)
        _check_memory(self)
        _check_runner(self)
        if self.start_tokens < 2:
            raise RefusedError(
                "start_length", "a start length of 1 token", hint="use `{}` or more", example=2
            )

    @property
    def settings(self) -> Settings:
        """Settings of every trial, with allocator and loss at defaults: a search varies those."""
        fields = (field for field in Settings.__struct_fields__ if field not in _OF_THE_LADDER)
        named = ((field, getattr(self, field)) for field in fields)
        # "auto" is left at the default: the cells that are made say what it is
        values = {field: value for field, value in named if value not in (None, "auto")}
        if self.token_budget is None:
            together = TRAITS[values["objective"]].documents_together
            values.setdefault("sequences_per_micro_batch", together)
        settings = Settings(**values)
        is_usual = settings.lora is not None and settings.lora_alpha == 2 * settings.lora
        return settings.replace(lora_alpha=None) if is_usual else settings

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The hyperparameters that all trials train with."""
        every = ((name, getattr(self, name)) for name in DEFAULTS)
        return Hyperparameters(**{name: value for name, value in every if value is not None})

    @property
    def rollout_request(self) -> RolloutRequest:
        """The settings of the engine that generates; equal to the defaults if none is named."""
        return RolloutRequest(
            **{name: getattr(self, name) for name in RolloutRequest.__struct_fields__}
        )

    @property
    def on_ray(self) -> bool:
        """True if trials run on a Ray cluster."""
        return self.runner == "ray" or (self.runner is None and self.address is not None)

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of each GPU that trials may take; None: the whole card."""
        if self.memory is None or self.device == "cpu":
            return None if self.memory is None else parse_bytes(str(self.memory))
        return card_memory(str(self.memory), parse_bytes)

    @property
    def host_memory_bytes(self) -> int | None:
        """Limit of a machine's host memory in bytes; None: the limit of its control group."""
        return None if self.host_memory is None else parse_memory(str(self.host_memory))

    @property
    def margin_bytes(self) -> int:
        """Headroom in bytes that a length must leave on every GPU to count as fitting."""
        return parse_memory(str(self.headroom or 0))

    @property
    def start_tokens(self) -> int:
        """Shortest length to try."""
        return parse_tokens(str(self.start_length))

    @property
    def accumulates(self) -> bool:
        """True if a step adds up the gradients of several micro-batches."""
        return self.micro_batches != 1

    @property
    def token_budget_tokens(self) -> int | None:
        """Tokens of a micro-batch for each GPU; None: its number of sequences is set instead."""
        return None if self.token_budget is None else parse_tokens(str(self.token_budget))

    @property
    def resolution_tokens(self) -> int | None:
        """Step between lengths in tokens; None: the published grid."""
        return None if self.resolution is None else parse_tokens(str(self.resolution))

    @property
    def max_tokens(self) -> int | None:
        """Longest length to try; None: the device's default."""
        return None if self.max_length is None else parse_tokens(str(self.max_length))

    @property
    def timeout_s(self) -> float:
        """Time limit of one trial in seconds, unless the search's budget sets a shorter one."""
        return _USUAL_TIMEOUT_S if self.timeout is None else parse_seconds(str(self.timeout))

    @property
    def budget_s(self) -> float | None:
        """Seconds that the whole search may take; None: no limit was named."""
        return None if self.budget is None else parse_seconds(str(self.budget))


_ROWS = {
    row.name: row
    for noun in (_FirstFields, Settings, Hyperparameters, RolloutRequest, Request)
    for row in noun.declared
}
DECLARED: Mapping[str, Setting] = {
    each.name: replace(
        _ROWS[each.name], default=each.default, choices=tuple(sorted(choices_of(each.type)))
    )
    for each in msgspec.structs.fields(Request)
}
"""Every setting that a user can name, in the order in which a help lists those of a topic."""
TOPICS: Mapping[Topic, tuple[Setting, ...]] = {
    topic: tuple(row for row in DECLARED.values() if row.topic == topic)
    for topic in get_args(Topic)
}


def taken_by(command: CommandName, *, but_not: CommandName | None = None) -> tuple[Setting, ...]:
    """The settings that ``command`` takes and ``but_not`` does not, in the order of the help."""
    return tuple(
        row
        for rows in TOPICS.values()
        for row in rows
        if command in row.commands and but_not not in row.commands
    )


def request_from(
    values: Mapping[str, object], *, config_file: str | None = None, keywords: bool = False
) -> Request:
    """Make a request of values from the command line, from Python (``keywords``), or from a file
    (``config_file`` is its name in errors). Errors spell settings as that source does. Raises
    UsageError for unknown names and values, with the most similar known name.
    """
    spelling = in_file(config_file) if config_file else KEYWORDS if keywords else TYPED
    _check_names(values, spelling)
    values = {name: _loosened(name, value) for name, value in values.items()}
    if spelling is TYPED and (gpus := values.get("gpus")) is not None:
        # a card's number in a count's place: `4090`, as `predict` takes
        shown = " ".join(map(str, gpus)) if isinstance(gpus, list | tuple) else str(gpus)
        if (kind := kind_by_number(shown)) is not None:
            problem = f"gpus {shown!r} is {kind.name}, and a count is asked for"
            raise UsageError(problem, hint=f"for example `{_elsewhere(shown)}`")
    # gradients are not added up in bf16: unless a number is named, a step has one micro-batch
    usual = {"micro_batches": 1} if values.get("parameters") == "bf16" else {}
    try:
        request = msgspec.convert({**usual, **values}, Request, strict=config_file is not None)
    except msgspec.ValidationError as error:
        raise _mistyped(error, values, spelling) from error
    except RefusedError as error:
        raise spelling.refused(error) from error
    foreign = foreign_name(request.trainer)
    if foreign is not None:
        named = (n for n, value in values.items() if value not in (None, IN_PLACE.get(n)))
        refuse_inexpressible(foreign, named, spelling)
    return request


def _check_names(values: Mapping[str, object], spelling: Spelling) -> None:
    """Raise UsageError for an unknown name, a missing model, or two names of one setting."""
    where = spelling.where
    for name in values:
        if name not in DECLARED:
            near = nearest(name, tuple(DECLARED))
            raise UsageError(
                f"{where}unknown setting {name!r}",
                hint=f"did you mean `{near}`?" if near else _EVERY_SETTING,
            )
    if not values.get("model"):
        hint = "name a directory, an id of the Hub or a catalog model: `highwater find Qwen3-0.6B`"
        if values.get("command"):
            typed = shlex.join(("--trainer", "command", "--command", str(values["command"])))
            own = re.search(r"--model(?:[-_]\w+)*[ =](\S+)", str(values["command"]))
            one = own[1] if own else "Qwen3-0.6B"
            hint = f"name the one that your command trains: `highwater find {one} {typed}`"
        raise UsageError(f"{where}no model is named", hint=hint)
    if all(values.get(name) is not None for name in PACKINGS):
        one, other = map(spelling.name, PACKINGS)
        raise UsageError(
            f"{where}{one} and {other}: both say how many sequences a micro-batch has",
            hint=f"leave `{one}` or `{other}` out",
        )


def _loosened(name: str, value: object) -> object:
    """The value, a lone number as a list, a text as its number: ``1e-6`` in YAML is text."""
    if DECLARED[name].is_list and type(value) is int:
        return [value]
    if name == SETTING:
        return loose_profiling(value)
    try:
        is_number = name in DEFAULTS or DECLARED[name].kind in (SHARE, NUMBER)
        return float(value) if is_number and isinstance(value, str) else value
    except ValueError:
        return value


def _mistyped(
    error: msgspec.ValidationError, values: Mapping[str, object], spelling: Spelling
) -> UsageError:
    """Turn a codec's error into a UsageError that names the setting as the user spelled it."""
    path = re.search(r"\$\.(\w+)", str(error))
    if path is None:
        return UsageError(f"{spelling.where}{error}", hint=_EVERY_SETTING)
    name = path[1]
    row, value = DECLARED[name], values.get(name)
    allowed = row.choices
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if name == "trainer" and shown in BY_COMMAND:
        title = BY_COMMAND[shown]
        return UsageError(
            f"{spelling.where}{title} is not ready: it is tried by a command of yours",
            hint=f"use `{spelling.setting(name, 'command')}`; {title}'s command is in {PAGE}",
        )
    problem = f"{spelling.where}{name} {shown!r} is not"
    if row.kind is None:
        typed = partial(spelling.setting, name)
        any_other = row.any_other and f"; `{typed(row.any_other)}` stands for any other"
        hint = word_hint(name, shown, allowed, typed=typed, listed=_EVERY_SETTING)
        return UsageError(f"{problem} one of {', '.join(allowed)}", hint=f"{hint}{any_other}")
    known = (*allowed, "true", "false") if row.stands_alone else allowed
    near = meant_word(name, shown, known) or row.example or row.kind.example
    works = spelling.setting(name, DEFAULTS.get(name, near))
    if name == "gpus" and spelling is TYPED and " " not in shown:
        with suppress(UsageError):
            works = _elsewhere(shown)
    return UsageError(f"{problem} {row.kind.expected}", hint=f"for example `{works}`")


def _elsewhere(shown: str) -> str:
    """Flags, for a hint, for GPUs of another machine; UsageError if ``shown`` names none."""
    meant = cluster(shown, gpu_memory_bytes=None, machine=None)
    memory = format_bytes(meant.device_bytes).replace(" ", "")
    works = f"--gpus {meant.gpus}`; find and try take as many that are elsewhere: `--gpus "
    return f"{works}{meant.gpus} --device cuda --memory {memory} --dry-run"


def setting_flags(settings: Settings, *, but_not: Collection[str] = ()) -> tuple[str, ...]:
    """Flags for these settings: allocator, loss and all non-default values, less ``but_not``."""
    asked, usual = values_of(settings), values_of(_RUNG)
    named = {name: asked.pop(name) for name in _OF_THE_LADDER}
    named |= {name: value for name, value in asked.items() if value != usual.get(name)}
    return tuple(words_of({name: n for name, n in named.items() if name not in but_not}))


def values_of(settings: Settings) -> dict[str, Any]:
    """The settings by the names that a request has for them."""
    values = {row.name: row.typed_for(getattr(settings, field)) for field, row in RUNG_ROWS.items()}
    if settings.token_budget_tokens is not None:
        del values["sequences_per_micro_batch"]
    return values


def trial_flags(
    cell: Cell, length_tokens: int, foreign: ForeignName | None = None
) -> tuple[str, ...]:
    """Flags of ``highwater try`` for a cell at a length, less those its trainer cannot take."""
    refused = FOREIGN[foreign].refused(DECLARED) if foreign else ()
    whose = ("--trainer", foreign) if foreign else ()
    settings = setting_flags(cell.settings, but_not=refused)
    degrees = {n: each for n, each in cell.layout.degree_settings.items() if n not in refused}
    where = words_of({"gpus": cell.layout.gpus, **degrees})
    return (*where, "--length", str(length_tokens), *whose, *settings)


def _check_runner(request: Request) -> None:
    if request.address is not None and request.runner == "local":
        raise RefusedError(
            "runner",
            f"{request.address} is the address of a Ray cluster, and trials run on this machine",
            hint="use `{}`, or leave the address out",
            example="ray",
        )
    if request.on_ray and request.dry_run:
        raise RefusedError(
            "runner",
            "a dry run trains nothing, and joins no cluster",
            hint="use `{}`, and no address",
            example="local",
        )
    if request.nodes > 1 and request.dry_run:
        raise RefusedError(
            "nodes",
            f"a dry run trains nothing, and {request.nodes} machines would wait for each other",
            hint=f"use `{{}}`; `highwater predict {request.model} --gpus 2x8xH100-80GB` says what "
            "they hold",
            example=1,
        )
    if request.on_ray and request.nodes > 1:
        raise RefusedError(
            "nodes",
            f"a trial across {request.nodes} machines is none of a Ray cluster, where each is on "
            "one",
            hint="use `{}`, or leave the runner and the address out",
            example=1,
        )


def _check_memory(request: Request) -> None:
    """Raise RefusedError for a memory too small for any trial, or given without a unit."""
    if request.memory_bytes is None or request.memory_bytes >= _SMALLEST_MEMORY_BYTES:
        return
    count, size = str(request.memory).strip(), request.memory_bytes
    is_plain = re.fullmatch(r"\d+(\.\d+)?", count) and 0 < float(count) <= 1024
    shown = f"{size} bytes" if size < MIB else format_bytes(size)
    raise RefusedError(
        "memory",
        f"no trial fits in a memory of {shown}; {format_bytes(_SMALLEST_MEMORY_BYTES)} is the "
        "least",
        hint="give the unit: `{}`" if is_plain else "use `{}` or more",
        example=f"{count}GiB" if is_plain else "80GiB" if request.device == "cuda" else "1GiB",
    )
