"""Request: what a user asks for, in the user's words: the flags of ``find``, the keys of
``--config``, the keywords of the API.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
from msgspec import inspect

from highwater.errors import UsageError
from highwater.nouns.codec import Record
from highwater.nouns.declaration import (
    KEYWORDS,
    MOST_GPUS,
    MOST_NAMED,
    NUMBER,
    SHARE,
    TYPED,
    RefusedError,
    Spelling,
    in_file,
    nearest,
    words_of,
)
from highwater.nouns.declared_settings import DECLARED
from highwater.nouns.foreign_trainer import (
    BY_COMMAND,
    FOREIGN,
    PAGE,
    ForeignName,
    foreign_name,
    refuse_inexpressible,
)
from highwater.nouns.hyperparameters import DEFAULTS, Hyperparameters, KlEstimator, out_of_range
from highwater.nouns.lora import LoraBase
from highwater.nouns.optimizer import OptimizerName
from highwater.nouns.profiling import SETTING, Profiling, loose_profiling
from highwater.nouns.settings import (
    Allocator,
    AttentionMethod,
    Checkpoint,
    Entropy,
    Loss,
    Objective,
    Offload,
    Parameters,
    Recompute,
    Rope,
    SaveHf,
    Settings,
    Strategy,
)
from highwater.nouns.sparse_pattern import PatternType, SparsityRatio
from highwater.nouns.study import Cell, Method, Proof
from highwater.nouns.trainer import TriedTrainer
from highwater.nouns.trial import Device
from highwater.units import (
    MIB,
    format_bytes,
    parse_bytes,
    parse_memory,
    parse_seconds,
    parse_tokens,
)

PACKINGS = ("sequences_per_micro_batch", "token_budget")
"""Both say how many sequences a micro-batch has: one of them is named, or none."""

_USUAL_TIMEOUT_S = 40 * 60.0
_SMALLEST_MEMORY_BYTES = 64 * MIB
"""Less than any trial needs."""
_OF_THE_LADDER = ("allocator", "loss")
"""Fields of ``Settings`` that differ from rung to rung; a request that names one keeps the rungs
with it."""
_OF_A_RUNG = {row.rung_field: row for row in DECLARED.values()}
_EVERY_SETTING = "`highwater schema` lists every setting"
_RUNG = Settings()
_NUMBERS = Hyperparameters()
"""Whose defaults are a request's, too."""

RunnerName = Literal["local", "ray"]
"""Who runs the trials."""
Size = str | int
Tokens = str | int
Time = str | int | float


class Request(Record, frozen=True, kw_only=True):
    """A search for the longest context that trains. Sizes as "80GiB", lengths as "32k", times as
    "40m".
    """

    model: str
    trainer: TriedTrainer = "highwater"
    command: str | None = None
    trainer_config: str | None = None
    done_pattern: str | None = None
    gpus: tuple[int, ...] | None = None
    ulysses: tuple[int, ...] = (1,)
    ring: tuple[int, ...] = (1,)
    copies: tuple[int, ...] = (1,)
    memory: Size | None = None
    loss: Loss | None = None
    allocator: Allocator | None = None
    recompute: Recompute = _RUNG.recompute
    mlp_tiles: int | None = _RUNG.mlp_tiles
    attention: AttentionMethod = _RUNG.attention
    pattern_type: PatternType = _RUNG.pattern_type
    sparsity_ratio: SparsityRatio = _RUNG.sparsity_ratio
    block_size: int = _RUNG.block_size
    local_window_size: int = _RUNG.local_window_size
    global_tokens: int = _RUNG.global_tokens
    strategy: Strategy = _RUNG.strategy
    optimizer: OptimizerName = _RUNG.optimizer
    parameters: Parameters = _RUNG.parameters
    offload: Offload = _RUNG.offload
    lora: int | None = _RUNG.lora
    lora_alpha: float | None = _RUNG.lora_alpha
    lora_targets: str = _RUNG.lora_targets
    lora_base: LoraBase = _RUNG.lora_base
    lora_merged: bool = _RUNG.lora_merged
    objective: Objective = _RUNG.objective
    critic: bool = _RUNG.critic
    entropy: Entropy = _RUNG.entropy
    learning_rate: float = _NUMBERS.learning_rate
    adam_beta1: float = _NUMBERS.adam_beta1
    adam_beta2: float = _NUMBERS.adam_beta2
    adam_epsilon: float = _NUMBERS.adam_epsilon
    weight_decay: float = _NUMBERS.weight_decay
    max_grad_norm: float = _NUMBERS.max_grad_norm
    clip_ratio_low: float = _NUMBERS.clip_ratio_low
    clip_ratio_high: float = _NUMBERS.clip_ratio_high
    dual_clip: float = _NUMBERS.dual_clip
    kl_estimator: KlEstimator = _NUMBERS.kl_estimator
    kl_coefficient: float = _NUMBERS.kl_coefficient
    entropy_coefficient: float = _NUMBERS.entropy_coefficient
    dpo_beta: float = _NUMBERS.dpo_beta
    value_clip: float = _NUMBERS.value_clip
    value_coefficient: float = _NUMBERS.value_coefficient
    discount: float = _NUMBERS.discount
    gae_lambda: float = _NUMBERS.gae_lambda
    checkpoint: Checkpoint = _RUNG.checkpoint
    save_hf: SaveHf = _RUNG.save_hf
    rope: Rope = _RUNG.rope
    sequences_per_micro_batch: int = _RUNG.sequences_per_micro_batch
    token_budget: Tokens | None = None
    start_length: Tokens = 4096
    resolution: Tokens | None = None
    max_length: Tokens | None = None
    method: Method = "bisect"
    proof: Proof | None = None
    prediction: str = "formula"
    confirm: int = 0
    headroom: Size = 0
    timeout: Time | None = None
    budget: Time | None = None
    steps: int = 2
    micro_batches: int = 2
    prompt_tokens: int | None = None
    data: str | None = None
    attention_depth: int | None = None
    device: Device | None = None
    runner: RunnerName | None = None
    address: str | None = None
    log_dir: str = "./logs"
    checkpoint_dir: str | None = None
    memory_profiler: Profiling | None = None
    study: str | None = None
    no_diagnose: bool = False
    retry_crashed: bool = False
    tensorboard: bool = False
    logit_range: bool = False
    max_concurrent_trials: int | None = None
    nodes: int = 1
    launcher: str | None = None
    rendezvous: str | None = None
    allow_busy: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for values that cannot work, whatever the model and the machine."""
        _check_texts(self)
        for row in DECLARED.values():
            try:
                getattr(self, row.rung_field)  # a size, a length or a time that can be read
            except UsageError as error:
                raise RefusedError(row.name, error.problem, hint=error.hint) from error
        for name, default in DEFAULTS.items():
            why = out_of_range(name, getattr(self, name))
            if why is not None:
                raise RefusedError(name, why, hint="for example `{}`", example=default)
        for name in ("gpus", "ulysses", "ring", "copies"):
            _check_counts(name, getattr(self, name))
        for name, least in (("max_concurrent_trials", 1), ("nodes", 1)):
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
    def common_settings(self) -> Settings:
        """What all rungs have in common; the ladder sets the others."""
        fields = (field for field in Settings.__struct_fields__ if field not in _OF_THE_LADDER)
        settings = Settings(**{field: getattr(self, field) for field in fields})
        is_usual = settings.lora is not None and settings.lora_alpha == 2 * settings.lora
        return msgspec.structs.replace(settings, lora_alpha=None) if is_usual else settings

    @property
    def hyperparameters(self) -> Hyperparameters:
        """What every rung trains with."""
        return Hyperparameters(**{name: getattr(self, name) for name in DEFAULTS})

    @property
    def on_ray(self) -> bool:
        """Whether trials run on a Ray cluster."""
        return self.runner == "ray" or (self.runner is None and self.address is not None)

    @property
    def memory_bytes(self) -> int | None:
        """Bound on the memory of each GPU; None: the whole card."""
        return None if self.memory is None else parse_bytes(str(self.memory))

    @property
    def margin_bytes(self) -> int:
        """Headroom that a length must leave."""
        return parse_memory(str(self.headroom))

    @property
    def start_tokens(self) -> int:
        """Shortest length to try."""
        return parse_tokens(str(self.start_length))

    @property
    def accumulates(self) -> bool:
        """Whether a step adds up the gradients of several micro-batches."""
        return self.micro_batches != 1

    @property
    def token_budget_tokens(self) -> int | None:
        """Tokens of a micro-batch for each GPU; None: the number of sequences is given."""
        return None if self.token_budget is None else parse_tokens(str(self.token_budget))

    @property
    def resolution_tokens(self) -> int | None:
        """Step between lengths; None: the published grid."""
        return None if self.resolution is None else parse_tokens(str(self.resolution))

    @property
    def max_tokens(self) -> int | None:
        """Longest length to try; None: the device's default."""
        return None if self.max_length is None else parse_tokens(str(self.max_length))

    @property
    def timeout_s(self) -> float:
        """Longest time for one trial, where no budget says another."""
        return _USUAL_TIMEOUT_S if self.timeout is None else parse_seconds(str(self.timeout))

    @property
    def budget_s(self) -> float | None:
        """Longest time for the whole search; None: nobody named one."""
        return None if self.budget is None else parse_seconds(str(self.budget))


def request_from(
    values: Mapping[str, object], *, config_file: str | None = None, keywords: bool = False
) -> Request:
    """The request in loose values: strings from a command line, keywords from Python, or what a
    configuration file says. ``config_file`` names the file that the values come from, and
    ``keywords`` that they come from Python, for errors that speak as the user does; neither: they
    were typed. Raises UsageError for names and values that are not known, with the nearest that is.
    """
    spelling = in_file(config_file) if config_file else KEYWORDS if keywords else TYPED
    _check_names(values, spelling)
    values = {name: _loosened(name, value) for name, value in values.items()}
    try:
        request = msgspec.convert(values, Request, strict=config_file is not None)
    except msgspec.ValidationError as error:
        raise _mistyped(error, values, spelling) from error
    except RefusedError as error:
        raise spelling.refused(error) from error
    foreign = foreign_name(request.trainer)
    if foreign is not None:
        named = (name for name, value in values.items() if value is not None)
        refuse_inexpressible(foreign, named, spelling)
    return request


def _check_names(values: Mapping[str, object], spelling: Spelling) -> None:
    """Raise UsageError for an unknown name, for no model, and for two names of one thing."""
    where = spelling.where
    for name in values:
        if name not in DECLARED:
            near = nearest(name, tuple(DECLARED))
            raise UsageError(
                f"{where}unknown setting {name!r}",
                hint=f"did you mean `{near}`?" if near else _EVERY_SETTING,
            )
    if not values.get("model"):
        raise UsageError(
            f"{where}no model is named",
            hint="name a directory, an id of the Hub or a catalog model: "
            "`highwater find Qwen3-0.6B`",
        )
    if all(values.get(name) is not None for name in PACKINGS):
        one, other = map(spelling.name, PACKINGS)
        raise UsageError(
            f"{where}{one} and {other}: both say how many sequences a micro-batch has",
            hint=f"leave `{one}` or `{other}` out",
        )


def _loosened(name: str, value: object) -> object:
    """A list of its only number, and the number in a text: ``1e-6`` is a text in YAML."""
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
    """The codec's error in the user's words: its path names the setting."""
    path = re.search(r"\$\.(\w+)", str(error))
    if path is None:
        return UsageError(f"{spelling.where}{error}", hint=_EVERY_SETTING)
    name = path[1]
    row, value, allowed = DECLARED[name], values.get(name), choices(name)
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if name == "trainer" and shown in BY_COMMAND:
        title = BY_COMMAND[shown]
        return UsageError(
            f"{spelling.where}{title} is not ready: it is tried by a command of yours",
            hint=f"use `{spelling.setting(name, 'command')}`; {title}'s command is in {PAGE}",
        )
    problem = f"{spelling.where}{name} {shown!r} is not"
    near = nearest(shown, allowed)
    if row.kind is None:
        works = spelling.setting(name, near or allowed[0])
        any_other = (
            row.any_other and f"; `{spelling.setting(name, row.any_other)}` stands for any other"
        )
        return UsageError(
            f"{problem} one of {', '.join(allowed)}", hint=f"use `{works}`{any_other}"
        )
    works = spelling.setting(name, DEFAULTS.get(name, near or row.example or row.kind.example))
    return UsageError(f"{problem} {row.kind.expected}", hint=f"for example `{works}`")


def setting_flags(settings: Settings, *, but_not: Collection[str] = ()) -> tuple[str, ...]:
    """The flags that name these settings: allocator and loss, which stand for a rung, and what is
    not the default; none of the fields ``but_not``.
    """
    asked, usual = values_of(settings), values_of(_RUNG)
    named = {name: asked.pop(name) for name in _OF_THE_LADDER}
    named |= {name: value for name, value in asked.items() if value != usual.get(name)}
    return tuple(words_of({name: n for name, n in named.items() if name not in but_not}))


def values_of(settings: Settings) -> dict[str, Any]:
    """What names these settings in a request, by its fields."""
    values = {
        _OF_A_RUNG[field].name: _OF_A_RUNG[field].typed_for(getattr(settings, field))
        for field in Settings.__struct_fields__
    }
    if settings.token_budget_tokens is not None:
        del values["sequences_per_micro_batch"]
    return values


def trial_flags(
    cell: Cell, length_tokens: int, foreign: ForeignName | None = None
) -> tuple[str, ...]:
    """The flags of ``highwater try`` that name a cell at a length, of this engine or of a foreign
    trainer, which is told no setting that it has not.
    """
    refused = FOREIGN[foreign].refused(DECLARED) if foreign else ()
    whose = ("--trainer", foreign) if foreign else ()
    settings = setting_flags(cell.settings, but_not=refused)
    return (*cell.layout.flags, "--length", str(length_tokens), *whose, *settings)


def choices(name: str) -> tuple[str, ...]:
    """What a setting may be, where that is a fixed list; empty for the others."""
    info = inspect.type_info(Request)
    assert isinstance(info, inspect.StructType)  # noqa: S101 - Request is one
    kind = next(field.type for field in info.fields if field.name == name)
    return tuple(str(value) for value in _literals(kind))


def _literals(kind: inspect.Type) -> list[Any]:
    match kind:
        case inspect.LiteralType(values=values):
            return list(values)
        case inspect.UnionType(types=types):
            return [value for inner in types for value in _literals(inner)]
        case inspect.Metadata(type=inner):
            return _literals(inner)
        case _:
            return []


def _check_texts(request: Request) -> None:
    """Raise RefusedError for a text with a zero byte or half of a character: no system takes it."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if isinstance(value, str) and (
            "\0" in value or any("\ud800" <= character <= "\udfff" for character in value)
        ):
            raise RefusedError(
                name,
                f"{name} {value!r} is no text that a file could be called",
                hint="leave such characters out",
            )


def _check_counts(name: str, counts: tuple[int, ...] | None) -> None:
    """Raise RefusedError for numbers of GPUs, or degrees, that cannot be."""
    if counts is None:
        return
    if not counts or min(counts) < 1:
        problem = f"{name} is {' '.join(map(str, counts)) or 'empty'}"
        raise RefusedError(name, problem, hint="use 1 or more, for example `{}`", example=[1])
    if max(counts) > MOST_GPUS:
        problem = f"{name} is {max(counts)}, and {MOST_GPUS} is the most"
        raise RefusedError(name, problem, hint="use `{}` or fewer", example=[MOST_GPUS])
    if len(counts) > MOST_NAMED:
        problem = f"{name} names {len(counts)} numbers, and {MOST_NAMED} is the most"
        raise RefusedError(name, problem, hint="name fewer, for example `{}`", example=[1, 2, 4, 8])


def _check_runner(request: Request) -> None:
    """Raise RefusedError for a cluster that nobody joins."""
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
    """Raise RefusedError for a memory in which no trial fits, or whose unit was left out."""
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
