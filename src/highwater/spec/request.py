"""Request: what a user asks for, in the user's words: the flags of ``find``, the keys of ``--config``, the keywords of the API."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

from highwater.errors import UsageError
from highwater.spec.codec import Noun
from highwater.spec.settings import Allocator, Loss, Recompute, Rope
from highwater.spec.study import Method
from highwater.spec.trial import Device
from highwater.units import parse_bytes, parse_seconds, parse_tokens

_EXPECTED = {"int": "a whole number", "array": "a list of whole numbers", "bool": "true or false", "": "what it should be"}
"""What the codec calls a type, and what a user does."""
_EXAMPLES = {"gpus": "1", "ulysses": "1", "sequences_per_micro_batch": "1", "confirm": "2", "steps": "2", "micro_batches": "2"}

Size = str | int
Tokens = str | int
Time = str | int | float


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
    rope: Annotated[
        Rope, Meta(description="auto: YaRN past the native length, unless the model scales itself; yarn: all the same")
    ] = "auto"
    sequences_per_micro_batch: Annotated[int, Meta(description="sequences packed into one micro-batch")] = 1
    start_length: Annotated[Tokens, Meta(description="shortest length to try, in tokens")] = 4096
    resolution: Annotated[
        Tokens | None, Meta(description="step between lengths; default: 4096 up to the native length, then a quarter of it")
    ] = None
    max_length: Annotated[Tokens | None, Meta(description="longest length to try; default: 1m tokens, on the CPU 8k")] = None
    method: Annotated[Method, Meta(description="bisect, or linear: the published upward scan")] = "bisect"
    confirm: Annotated[int, Meta(description="times that both trials of the edge are repeated")] = 0
    margin: Annotated[Size, Meta(description="headroom that a length must leave to count, for example 2GiB")] = 0
    timeout: Annotated[Time, Meta(description="longest time for one trial")] = "40m"
    steps: Annotated[int, Meta(description="optimizer steps of a trial, 2 or more")] = 2
    micro_batches: Annotated[int, Meta(description="micro-batches of a step, 2 or more")] = 2
    data: Annotated[str | None, Meta(description="module:function that yields token batches; default: synthetic ones")] = None
    device: Annotated[Device | None, Meta(description="what to train on; default: cuda where there is a GPU")] = None
    log_dir: Annotated[str, Meta(description="directory of logs and studies")] = "./logs"
    study: Annotated[str | None, Meta(description="file of the study; default: one for each question, under the log directory")] = (
        None
    )
    allow_busy: Annotated[bool, Meta(description="also start on GPUs that somebody else uses")] = False
    dry_run: Annotated[bool, Meta(description="answer from a memory law; nothing is trained")] = False

    def __post_init__(self) -> None:
        """Raise UsageError for values that cannot work, whatever the model and the machine."""
        _ = (self.memory_bytes, self.margin_bytes, self.start_tokens, self.resolution_tokens, self.max_tokens, self.timeout_s)
        for name in ("gpus", "ulysses"):
            values: tuple[int, ...] | None = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise UsageError(
                    f"{name} is {' '.join(map(str, values)) or 'empty'}", hint=f"use 1 or more, for example `--{name} 1`"
                )

    @property
    def memory_bytes(self) -> int | None:
        """Bound on the memory of each GPU; None: the whole card."""
        return None if self.memory is None else parse_bytes(str(self.memory))

    @property
    def margin_bytes(self) -> int:
        """Headroom that a length must leave."""
        return parse_bytes(str(self.margin))

    @property
    def start_tokens(self) -> int:
        """Shortest length to try."""
        return parse_tokens(str(self.start_length))

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


def request_from(values: Mapping[str, object], *, config_file: str | None = None) -> Request:
    """The request in loose values: strings from a command line, or what a configuration file says.

    ``config_file`` names the file that the values come from, for errors; None: they were typed.
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
    try:
        return msgspec.convert(values, Request, strict=config_file is not None)
    except msgspec.ValidationError as error:
        raise _explained(error, values, where, is_config=config_file is not None) from error


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


def _explained(error: msgspec.ValidationError, values: Mapping[str, object], where: str, *, is_config: bool) -> UsageError:
    """The codec's error in the user's words: its path names the setting."""
    path = re.search(r"\$\.(\w+)", str(error))
    if path is None:
        return UsageError(f"{where}{error}", hint="`highwater schema` lists every setting")
    name = path[1]
    value, allowed = values.get(name), choices(name)
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if allowed:
        near = _nearest(shown, allowed) or allowed[0]
        problem = f"{name} {shown!r} is not one of {', '.join(allowed)}"
    else:
        near = _EXAMPLES.get(name, "")
        expected = next(words for kind, words in _EXPECTED.items() if f"Expected `{kind}" in str(error))
        problem = f"{name} {shown!r} is not {expected}"
    spelled = f"{name}: {near}" if is_config else f"--{name.replace('_', '-')} {near}".rstrip()
    return UsageError(f"{where}{problem}", hint=f"for example `{spelled}`" if not allowed else f"use `{spelled}`")


def _nearest(name: str, known: tuple[str, ...]) -> str | None:
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.5)), None)
