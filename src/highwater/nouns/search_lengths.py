"""The lengths that a search of a model may try: its grid, and where the native length or YaRN ends
it.
"""

from highwater.errors import UsageError
from highwater.model.model import Model
from highwater.model.rope import WITHOUT_YARN_IN_FILES, ends_at_native, unscalable, yarn
from highwater.nouns.foreign_trainer import foreign_name
from highwater.nouns.grid import PUBLISHED_STEP_TOKENS, Grid
from highwater.nouns.request import Request
from highwater.nouns.settings import Rope
from highwater.nouns.trial import Device
from highwater.units import format_tokens

CEILING_TOKENS: dict[Device, int] = {"cuda": 1024**2, "cpu": 8192}
"""Longest length to try unless the user names one. On the CPU, where attention's square is felt, a
search has to end."""


def grid_of(request: Request, model: Model, device: Device) -> tuple[Grid, tuple[str, ...]]:
    """The lengths to try, and why they end where nobody asked for an end."""
    native = model.shape.native_length_tokens
    longest, notes = _longest(request, model, device)
    grid = Grid(
        start_tokens=request.start_tokens,
        step_tokens=request.resolution_tokens or PUBLISHED_STEP_TOKENS,
        native_length_tokens=native,
        beyond_step_tokens=request.resolution_tokens or max(1, native // 4),
        max_tokens=longest,
    )
    return grid, notes


def _longest(request: Request, model: Model, device: Device) -> tuple[int, tuple[str, ...]]:
    """The longest length to try, and why it is that one: native where nothing scales past it."""
    native = model.shape.native_length_tokens
    longest, notes = request.max_tokens or CEILING_TOKENS[device], ()
    if request.max_tokens is None and device == "cpu":
        longest = max(longest, request.start_tokens)
        notes = (
            f"on the CPU lengths end at {format_tokens(longest)}; `--max-length` names another end",
        )
    is_ours = foreign_name(request.trainer) is None  # another trainer scales positions as it likes
    if is_ours and longest > native and ends_at_native(model, request.rope):
        refuse_past_native(model, request.rope, request.start_tokens, flag="--start-length")
        longest = native
        why = f"{model.name}'s own RoPE scaling does; `--rope yarn` goes past it"
        if unscalable(model) is not None:
            why = f"{model.name} was made for them, and {unscalable(model)}"
        notes = (f"lengths end at {format_tokens(native)}: {why}",)
    return longest, notes


def refuse_past_native(model: Model, rope: Rope, length_tokens: int, *, flag: str) -> None:
    """Raise UsageError for a length, named by ``flag``, past which nothing scales positions."""
    native = model.shape.native_length_tokens
    if length_tokens <= native or not ends_at_native(model, rope):
        return
    length, longest = format_tokens(length_tokens), format_tokens(native)
    if unscalable(model) is not None:
        raise UsageError(
            f"{length} tokens are past the {longest} that {model.name} was made for, and "
            f"{unscalable(model)}",
            hint=f"use `{flag} {native}`",
        )
    raise UsageError(
        f"{model.name} scales its own RoPE up to {longest} tokens: {length} is past it",
        hint=f"add `--rope yarn` to scale by YaRN instead, or stay at {native} or below",
    )


def check_yarn(request: Request, model: Model, longest_tokens: int) -> None:
    """Raise UsageError where YaRN cannot be, or what is saved with it could not be loaded."""
    obstacle = unscalable(model)
    if request.rope == "yarn" and model.own_rope_scaling and obstacle is not None:
        raise UsageError(
            f"`--rope yarn` cannot replace {model.name}'s own scaling: {obstacle}",
            hint="leave `--rope` out",
        )
    is_saved = request.save_hf != "never" and model.shape.model_type in WITHOUT_YARN_IN_FILES
    if is_saved and yarn(model, length_tokens=longest_tokens, rope=request.rope) is not None:
        raise UsageError(
            f"{model.shape.model_type} in transformers takes no YaRN from its config: what is "
            f"saved of {model.name} with "
            "it could not be loaded",
            hint="leave `--save-hf` out",
        )
