"""Request: what a user asks for, in the user's words: the flags of ``find``, the keys of ``--config``, the keywords of the API."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

from highwater.errors import UsageError
from highwater.spec.bounds import MOST_GPUS, MOST_NAMED
from highwater.spec.codec import Noun
from highwater.spec.hyperparameters import DEFAULTS, KlEstimator, out_of_range
from highwater.spec.settings import Allocator, Checkpoint, Entropy, Loss, Objective, Recompute, Rope, SaveHf, Settings, Strategy
from highwater.spec.study import Cell, Method, Proof
from highwater.spec.trial import Device
from highwater.units import MIB, format_bytes, parse_bytes, parse_memory, parse_seconds, parse_tokens

_EXPECTED: dict[str, tuple[str, Any]] = {
    "model": ("a directory or a catalog name", "Qwen3-0.6B"),
    "gpus": ("a whole number, or a list of them", [1]),
    "ulysses": ("a whole number, or a list of them", [1]),
    "memory": ("a size", "80GiB"),
    "sequences_per_micro_batch": ("a whole number", 1),
    "mlp_tiles": ("a whole number", 8),
    "start_length": ("a length in tokens", "4k"),
    "token_budget": ("a number of tokens", "16k"),
    "resolution": ("a length in tokens", "4k"),
    "max_length": ("a length in tokens", "256k"),
    "prediction": ("formula, trace or a file", "formula"),
    "confirm": ("a whole number", 2),
    "margin": ("a size", "2GiB"),
    "timeout": ("a time", "40m"),
    "steps": ("a whole number", 2),
    "micro_batches": ("a whole number", 2),
    "attention_depth": ("a whole number", 1),
    "data": ("module:function", "my_package.batches:packed"),
    "log_dir": ("a directory", "./logs"),
    "checkpoint_dir": ("a directory", "./checkpoints"),
    "study": ("a file", "study.jsonl"),
    "retry_crashed": ("true or false", True),
    "allow_busy": ("true or false", True),
    **{name: ("a number", value) for name, value in DEFAULTS.items() if name != "kl_estimator"},
    "offload": ("true or false", True),
    "critic": ("true or false", True),
    "dry_run": ("true or false", True),
}
"""What a setting without fixed choices has to be, and one that works."""

ONE_OR_SEVERAL = ("gpus", "ulysses")
"""Lists that may be given as their only number."""

PACKINGS = ("sequences_per_micro_batch", "token_budget")
"""Both say how many sequences a micro-batch has: one of them is named, or none."""

_SMALLEST_MEMORY_BYTES = 64 * MIB
"""Less than any trial needs: who asks for it has left out the unit."""

Size = str | int
Tokens = str | int
Time = str | int | float


class _RefusedError(UsageError):
    """A value that a setting cannot have. ``{}`` in the hint stands for the setting with ``example``, as its user spells it."""

    def __init__(self, name: str, problem: str, *, hint: str, example: Any = None) -> None:
        super().__init__(problem, hint=hint)
        self.name = name
        self.example = example


class Request(Noun, frozen=True, kw_only=True):
    """A search for the longest context that trains. Sizes as "80GiB", lengths as "32k", times as "40m"."""

    model: Annotated[str, Meta(description="directory of a Hugging Face model, or a catalog name such as Qwen3-0.6B")]
    gpus: Annotated[
        tuple[int, ...] | None, Meta(description="GPU counts to search; default: the powers of two up to those present")
    ] = None
    ulysses: Annotated[tuple[int, ...], Meta(description="Ulysses degrees (SP): GPUs that share one sequence")] = (1,)
    memory: Annotated[
        Size | None, Meta(description="bound on the memory of each GPU, for example 79.15GiB; on the CPU of each process")
    ] = None
    loss: Annotated[Loss | None, Meta(description="keep only rungs with this loss; default: the whole ladder")] = None
    allocator: Annotated[Allocator | None, Meta(description="keep only rungs with this allocator; default: the whole ladder")] = (
        None
    )
    recompute: Annotated[Recompute, Meta(description="activations recomputed in the backward pass")] = "layer"
    mlp_tiles: Annotated[
        int | None,
        Meta(description="tiles over the tokens that an MLP goes in; default: as recompute has them for free"),
    ] = None
    strategy: Annotated[Strategy, Meta(description="how parameters, gradients and optimizer states are sharded")] = "fsdp2"
    offload: Annotated[bool, Meta(description="keep parameters, gradients and optimizer states in host memory")] = False
    objective: Annotated[
        Objective,
        Meta(description="what is minimised, as the mean over all trained tokens of a step (TRL's dapo, verl's token-mean)"),
    ] = "sft"
    critic: Annotated[bool, Meta(description="ppo: train a model of token values along")] = False
    entropy: Annotated[Entropy, Meta(description="entropy in the loss of grpo and ppo: none, full, or chunked (recomputed)")] = (
        "none"
    )
    learning_rate: Annotated[float, Meta(description="AdamW's learning rate")] = DEFAULTS["learning_rate"]
    adam_beta1: Annotated[float, Meta(description="AdamW's beta of the gradients' running mean")] = DEFAULTS["adam_beta1"]
    adam_beta2: Annotated[float, Meta(description="AdamW's beta of the squares' running mean")] = DEFAULTS["adam_beta2"]
    adam_epsilon: Annotated[float, Meta(description="AdamW's epsilon")] = DEFAULTS["adam_epsilon"]
    weight_decay: Annotated[float, Meta(description="AdamW's weight decay; norms and biases have none")] = DEFAULTS["weight_decay"]
    max_grad_norm: Annotated[float, Meta(description="norm that gradients are clipped to; 0: no clipping")] = DEFAULTS[
        "max_grad_norm"
    ]
    clip_ratio_low: Annotated[
        float, Meta(description="grpo, ppo: how far below 1 a ratio of probabilities counts (TRL's epsilon)")
    ] = DEFAULTS["clip_ratio_low"]
    clip_ratio_high: Annotated[
        float, Meta(description="grpo, ppo: how far above 1 a ratio of probabilities counts (TRL's epsilon_high)")
    ] = DEFAULTS["clip_ratio_high"]
    dual_clip: Annotated[
        float,
        Meta(
            description="grpo, ppo: largest ratio of a token with a negative advantage (verl's clip_ratio_c, TRL's delta); 0: none"
        ),
    ] = DEFAULTS["dual_clip"]
    kl_estimator: Annotated[
        KlEstimator, Meta(description="grpo: estimator of the divergence from the reference (k3: verl's low_var_kl, and TRL's)")
    ] = DEFAULTS["kl_estimator"]
    kl_coefficient: Annotated[float, Meta(description="grpo: weight of that divergence (verl's kl_loss_coef, TRL's beta)")] = (
        DEFAULTS["kl_coefficient"]
    )
    entropy_coefficient: Annotated[float, Meta(description="grpo, ppo: weight of the entropy, where there is one")] = DEFAULTS[
        "entropy_coefficient"
    ]
    value_clip: Annotated[float, Meta(description="ppo with a critic: how far a value may move (verl's cliprange_value)")] = (
        DEFAULTS["value_clip"]
    )
    value_coefficient: Annotated[float, Meta(description="ppo with a critic: weight of its squared error")] = DEFAULTS[
        "value_coefficient"
    ]
    discount: Annotated[float, Meta(description="ppo: discount of rewards (gamma)")] = DEFAULTS["discount"]
    gae_lambda: Annotated[float, Meta(description="ppo: lambda of the generalized advantages")] = DEFAULTS["gae_lambda"]
    checkpoint: Annotated[Checkpoint, Meta(description="sharded: write model and optimizer after the last step")] = "none"
    save_hf: Annotated[SaveHf, Meta(description="when Hugging Face weights are written")] = "never"
    rope: Annotated[
        Rope, Meta(description="auto: YaRN past the native length, unless the model scales itself; yarn: all the same")
    ] = "auto"
    sequences_per_micro_batch: Annotated[int, Meta(description="sequences packed into one micro-batch")] = 1
    token_budget: Annotated[
        Tokens | None, Meta(description="tokens of a micro-batch for each GPU: packs as many sequences as they hold")
    ] = None
    start_length: Annotated[Tokens, Meta(description="shortest length to try, in tokens")] = 4096
    resolution: Annotated[
        Tokens | None, Meta(description="step between lengths; default: 4096 up to the native length, then a quarter of it")
    ] = None
    max_length: Annotated[Tokens | None, Meta(description="longest length to try; default: 1m tokens, on the CPU 8k")] = None
    method: Annotated[Method, Meta(description="bisect, or linear: the published upward scan")] = "bisect"
    proof: Annotated[
        Proof, Meta(description="memory: a memory-only trial proves what fits where a full one would exceed the timeout")
    ] = "full"
    prediction: Annotated[
        str, Meta(description="which length is tried first: by formula, by trace, or by a file of `highwater predict --json`")
    ] = "formula"
    confirm: Annotated[int, Meta(description="times that both trials of the edge are repeated")] = 0
    margin: Annotated[Size, Meta(description="headroom that a length must leave to count, for example 2GiB")] = 0
    timeout: Annotated[Time, Meta(description="longest time for one trial")] = "40m"
    steps: Annotated[int, Meta(description="optimizer steps of a trial, 2 or more")] = 2
    micro_batches: Annotated[int, Meta(description="micro-batches of a step, 2 or more")] = 2
    data: Annotated[
        str | None,
        Meta(description="module:function that yields token batches: code of yours, which is run; default: synthetic ones"),
    ] = None
    attention_depth: Annotated[
        int | None,
        Meta(description="memory-only trial: attention over whole documents in the last N layers alone, on short pieces elsewhere"),
    ] = None
    device: Annotated[Device | None, Meta(description="what to train on; default: cuda where there is a GPU")] = None
    log_dir: Annotated[str, Meta(description="directory of logs and studies")] = "./logs"
    checkpoint_dir: Annotated[
        str | None, Meta(description="directory below which trials save what they save; default: under the log directory")
    ] = None
    study: Annotated[str | None, Meta(description="file of the study; default: one for each question, under the log directory")] = (
        None
    )
    retry_crashed: Annotated[bool, Meta(description="launch again what only crashed when the study was last searched")] = False
    allow_busy: Annotated[bool, Meta(description="also start on GPUs that somebody else uses")] = False
    dry_run: Annotated[bool, Meta(description="answer from a memory law; nothing is trained")] = False

    def __post_init__(self) -> None:
        """Raise UsageError for values that cannot work, whatever the model and the machine."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and not _is_text(value):
                raise _RefusedError(
                    name, f"{name} {value!r} is no text that a file could be called", hint="leave such characters out"
                )
        for name, in_base_units in _READ_FROM.items():
            try:
                getattr(self, in_base_units)
            except UsageError as error:
                raise _RefusedError(name, error.problem, hint=error.hint) from error
        for name, default in DEFAULTS.items():
            why = out_of_range(name, getattr(self, name))
            if why is not None:
                raise _RefusedError(name, why, hint="for example `{}`", example=default)
        for name in ONE_OR_SEVERAL:
            values: tuple[int, ...] | None = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                problem = f"{name} is {' '.join(map(str, values)) or 'empty'}"
                raise _RefusedError(name, problem, hint="use 1 or more, for example `{}`", example=[1])
            if values is not None and max(values) > MOST_GPUS:
                problem = f"{name} is {max(values)}, and {MOST_GPUS} is the most"
                raise _RefusedError(name, problem, hint="use `{}` or fewer", example=[MOST_GPUS])
            if values is not None and len(values) > MOST_NAMED:
                problem = f"{name} names {len(values)} numbers, and {MOST_NAMED} is the most"
                raise _RefusedError(name, problem, hint="name fewer, for example `{}`", example=[1, 2, 4, 8])
        if self.memory_bytes is not None and self.memory_bytes < _SMALLEST_MEMORY_BYTES:
            count = str(self.memory).strip()
            problem = f"no trial fits in a memory of {self.memory_bytes} bytes; {format_bytes(_SMALLEST_MEMORY_BYTES)} is the least"
            meant = f"{count}GiB" if re.fullmatch(r"\d+(\.\d+)?", count) and 0 < float(count) <= 1024 else "80GiB"
            raise _RefusedError("memory", problem, hint="give the unit: `{}`", example=meant)
        if self.start_tokens < 2:
            raise _RefusedError("start_length", "a start length of 1 token", hint="use `{}` or more", example=2)

    @property
    def memory_bytes(self) -> int | None:
        """Bound on the memory of each GPU; None: the whole card."""
        return None if self.memory is None else parse_bytes(str(self.memory))

    @property
    def margin_bytes(self) -> int:
        """Headroom that a length must leave."""
        return parse_memory(str(self.margin))

    @property
    def start_tokens(self) -> int:
        """Shortest length to try."""
        return parse_tokens(str(self.start_length))

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
        """Longest time for one trial."""
        return parse_seconds(str(self.timeout))


_READ_FROM = {
    "memory": "memory_bytes",
    "margin": "margin_bytes",
    "start_length": "start_tokens",
    "token_budget": "token_budget_tokens",
    "resolution": "resolution_tokens",
    "max_length": "max_tokens",
    "timeout": "timeout_s",
}
"""Settings that are text with a unit, and the property that reads them."""


def request_from(values: Mapping[str, object], *, config_file: str | None = None, keywords: bool = False) -> Request:
    """The request in loose values: strings from a command line, keywords from Python, or what a configuration file says.

    ``config_file`` names the file that the values come from, and ``keywords`` that they come from Python, for errors that
    speak as the user does; neither: they were typed.
    Raises UsageError for names and values that are not known, with the nearest that is.
    """
    where = f"{config_file}: " if config_file else ""
    for name in values:
        if name not in Request.__struct_fields__:
            near = _nearest(name, Request.__struct_fields__)
            raise UsageError(
                f"{where}unknown setting {name!r}",
                hint=f"did you mean `{near}`?" if near else "`highwater schema` lists every setting",
            )
    if not values.get("model"):
        raise UsageError(f"{where}no model is named", hint="name a directory or a catalog model: `highwater find Qwen3-0.6B`")
    values = {name: [value] if name in ONE_OR_SEVERAL and type(value) is int else value for name, value in values.items()}
    values = {name: _number(value) if name in DEFAULTS else value for name, value in values.items()}
    spell = _as_keyword if keywords else _as_key if config_file else _as_flag
    if all(values.get(name) is not None for name in PACKINGS):
        one, other = (_as_flag(name, "") if spell is _as_flag else name for name in PACKINGS)
        raise UsageError(
            f"{where}{one} and {other}: both say how many sequences a micro-batch has", hint=f"leave `{one}` or `{other}` out"
        )
    try:
        return msgspec.convert(values, Request, strict=config_file is not None)
    except msgspec.ValidationError as error:
        raise _explained(error, values, where, spell) from error
    except _RefusedError as error:
        names_it = spell is _as_flag or error.problem.startswith(error.name)
        problem = error.problem if names_it else f"{error.name}: {error.problem}"
        raise UsageError(f"{where}{problem}", hint=error.hint.replace("{}", spell(error.name, error.example))) from error


def _number(value: object) -> object:
    """The number in a text, which ``1e-6`` is in YAML: there a number with an exponent has a dot too."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def setting_flags(settings: Settings) -> tuple[str, ...]:
    """The flags that name these settings: allocator and loss, which stand for a rung, and what is not the default."""
    words = ["--allocator", settings.allocator, "--loss", settings.loss]
    for name in Settings.__struct_fields__:
        value = getattr(settings, name)
        if name == "sequences_per_micro_batch" and settings.token_budget_tokens is not None:
            continue
        if name not in ("allocator", "loss") and value != getattr(Settings(), name):
            words.append(f"--{name.removesuffix('_tokens').replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return tuple(words)


def trial_flags(cell: Cell, length_tokens: int) -> tuple[str, ...]:
    """The flags of ``highwater try`` that name a cell at a length."""
    return (*cell.layout.flags, "--length", str(length_tokens), *setting_flags(cell.settings))


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


def _as_flag(name: str, value: Any) -> str:
    shown = "" if value is True else " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{name.replace('_', '-')} {shown}".rstrip()


def _as_key(name: str, value: Any) -> str:
    return f"{name}: {'true' if value is True else value}"


def _as_keyword(name: str, value: Any) -> str:
    return f"{name}={value!r}"


def _explained(
    error: msgspec.ValidationError, values: Mapping[str, object], where: str, spell: Callable[[str, Any], str]
) -> UsageError:
    """The codec's error in the user's words: its path names the setting."""
    path = re.search(r"\$\.(\w+)", str(error))
    if path is None:
        return UsageError(f"{where}{error}", hint="`highwater schema` lists every setting")
    name = path[1]
    value, allowed = values.get(name), choices(name)
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if allowed:
        near = _nearest(shown, allowed) or allowed[0]
        return UsageError(f"{where}{name} {shown!r} is not one of {', '.join(allowed)}", hint=f"use `{spell(name, near)}`")
    expected, example = _EXPECTED[name]
    return UsageError(f"{where}{name} {shown!r} is not {expected}", hint=f"for example `{spell(name, example)}`")


def _is_text(value: str) -> bool:
    """It has no zero byte, and no half of a character: what no system takes, and no study could record."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _nearest(name: str, known: tuple[str, ...]) -> str | None:
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.5)), None)
