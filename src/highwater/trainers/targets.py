"""Targets: a row for every trainer that a configuration is emitted for."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Protocol

import msgspec

from highwater.errors import UsageError
from highwater.model.model_place import catalog_model, model_place
from highwater.nouns.declaration import words_of
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.request import DECLARED
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trainer import (
    TRAINERS,
    Target,
    TrainerName,
    TrainerParts,
    is_step_of,
    trainer_title,
)
from highwater.trainers.emitted import Emitted, bytes_with_logits, refuse_several_machines


class Emit(Protocol):
    """Makes the configuration of one trainer."""

    def __call__(
        self, found: Recommendation, chosen: Candidate, *, model_path: str | None = None
    ) -> Emitted:
        """Make the configuration of a recommendation whose chosen rung is ``chosen``. Raises
        UsageError for what the trainer has no words for.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitTarget:
    """One trainer that a configuration is emitted for."""

    file: str
    """The name of its configuration's file, which the command that starts it has."""
    emit: Emit
    yours: tuple[str, ...]
    """What its files leave to the user, for a page of what to check."""
    predicted_for: TrainerName
    """The trainer whose step is predicted: its own, where ``is_step_of`` says so. Else it is one to
    compare with: verl's actor for trainers with GRPO in whole logits, or this engine."""
    package: str | None = None
    """The package that has it; None: it is called as the target is."""
    is_in_guides: bool = True
    """Whether a guide's page has its configuration for every length: a page stays small."""
    before: tuple[str, ...] = ()
    """Lines of a shell that have to run before the command that starts it."""
    knows: frozenset[str]
    """Settings, by the names that users type, that its configuration sets, or says that it cannot.
    Any other has to be at its default, so that a new setting is refused until somebody wrote here
    what the trainer does with it."""


OF_ALL = frozenset(
    (
        *("ulysses", "strategy", "allocator", "offload", "objective", "rope", "entropy"),
        *("sequences_per_micro_batch", "token_budget"),
        *("save_hf", "checkpoint"),  # what is saved, and when, is the user's to add
    )
)
OF_LORA = {"lora", "lora_alpha", "lora_targets"}
OF_THE_ENGINE = OF_ALL | {"loss", "recompute", "mlp_tiles", "micro_batches", "ring", "copies"}

TARGETS: Mapping[Target, EmitTarget] = TrainerParts(Target, "TARGET")
"""The trainers, by the name that ``highwater emit --for`` takes."""


_NOBODYS = {"offload": "states"}
"""Values of settings that no trainer has words for, by the setting. What others call offload of the
optimizer moves it all back before the update (verl), or updates on the host (DeepSpeed)."""


def refuse_unknown_settings(target: Target, settings: Mapping[str, object]) -> None:
    """Raise UsageError naming all settings that a trainer's predicted step has not."""
    row = TARGETS[target]
    refused = TRAINERS[row.predicted_for].refused(settings)
    refused += [name for name, value in _NOBODYS.items() if settings.get(name) == value]
    if refused:
        raise _without_words(target, {name: settings[name] for name in refused})


def refuse_drafts(target: Target, draft: Recommendation, *, model: str) -> None:
    """Raise UsageError where a trainer has no words for any candidate of a recommendation that
    nobody has predicted yet: the one for the simplest.
    """
    refused: UsageError | None = None
    for each in draft.candidates:
        try:
            configured(target, draft, each, model=model)
        except UsageError as error:
            refused = refused or error
        else:
            return
    if refused is not None:
        raise refused


class Configured(NamedTuple):
    """A candidate, and its configuration."""

    candidate: Candidate
    emitted: Emitted


def configured_choice(
    target: Target, found: Recommendation, *, model: str, is_filled_in: bool = False
) -> Configured | None:
    """The configuration of the simplest candidate that fits and that the trainer has words for, if
    there is one whose logits are not whole there; else of the simplest that has room for them, or
    of the one that lacks least. None where no candidate fits.

    Raises UsageError, for the simplest, where the trainer has words for none.
    """
    refused: UsageError | None = None
    whole: list[tuple[int, Configured]] = []
    room_bytes = found.device_bytes - found.reserved_bytes
    for each in found.candidates:
        if not each.fits or not _has_words(each.cell):
            continue
        try:
            made = configured(target, found, each, model=model, is_filled_in=is_filled_in)
        except UsageError as error:
            refused = refused or error
            continue
        if made.logits_bytes is None:
            return Configured(each, made)
        lacks_bytes = bytes_with_logits(found, each, made.logits_bytes) - room_bytes
        whole.append((max(0, lacks_bytes), Configured(each, made)))
    if not whole and refused is not None:
        raise refused
    return min(whole, key=itemgetter(0))[1] if whole else None


def _has_words(cell: Cell) -> bool:
    return not any(getattr(cell.settings, name) == value for name, value in _NOBODYS.items())


def configured(
    target: Target,
    found: Recommendation,
    chosen: Candidate,
    *,
    model: str,
    is_filled_in: bool = False,
) -> Emitted:
    """One trainer's configuration, of ``model`` as somebody named it: a directory stands there by
    its whole path, a model of the Hub by its id. A name of the catalog alone stands for no files,
    unless ``is_filled_in`` says that its id on the Hub does.

    Raises UsageError for what the trainer has no words for.
    """
    row = TARGETS[target]
    refuse_several_machines(chosen.cell.layout, found.device_name)
    if not _has_words(chosen.cell):
        raise _without_words(target, _NOBODYS)
    opened_as = model_place(model).opened_as or (hub_id_of(model) if is_filled_in else None)
    made = row.emit(found, chosen, model_path=opened_as)
    unknown = {name: n for name, n in named(chosen.cell).items() if name not in row.knows}
    if unknown:
        raise _without_words(target, unknown)
    if is_step_of(found.trainer, target):
        return msgspec.structs.replace(made, fits=chosen.fits, logits_bytes=None)
    room_bytes = found.device_bytes - found.reserved_bytes
    is_too_large = (made.logits_bytes or 0) > room_bytes
    return msgspec.structs.replace(made, fits=False if is_too_large else None)


def hub_id_of(name: str) -> str | None:
    """The id on the Hub of a catalog model, of the very one that was named; None: it has none."""
    known = catalog_model(name)
    if known is None:
        return None
    spelled, model = known
    named_so = (each for each in model.hub_ids if each.rpartition("/")[2] == spelled)
    return next(named_so, model.hub_id)


def _without_words(target: Target, unknown: Mapping[str, object]) -> UsageError:
    words = shlex.join(words_of(unknown))
    return UsageError(
        f"{trainer_title(target)}'s configuration has no words for {words}",
        hint=f"leave `{words}` out",
    )


def named(cell: Cell) -> dict[str, object]:
    """What a cell has other than by default, by the names that users type, in their order."""
    default = Settings()
    rows = [row for row in DECLARED.values() if hasattr(default, row.rung_field)]
    differs: dict[str, object] = {
        row.name: row.typed_for(getattr(cell.settings, row.rung_field))
        for row in rows
        if getattr(cell.settings, row.rung_field) != getattr(default, row.rung_field)
    }
    return differs | {name: n for name, n in cell.layout.degree_settings.items() if n > 1}
