"""Targets: a row for every trainer that a configuration is emitted for; and the folder with its
files, the script that starts the training, and a page of things to check.

No file in a folder is overwritten. If a file exists with the same content it stays, so that a
command can be repeated; if a file has different content, nothing is written.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, Protocol

from highwater.errors import MachineError, UsageError
from highwater.memory.trainers import refused_settings
from highwater.model.model_place import catalog_model, model_place
from highwater.nouns.codec import SETTINGS_BYTES, read_file
from highwater.nouns.declaration import words_of
from highwater.nouns.objective import ATTENTION, TRAITS, RolloutRequest, expert_targets
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.request import DECLARED
from highwater.nouns.study import Cell
from highwater.nouns.trainer import (
    OURS,
    REGISTRY,
    Target,
    TrainerName,
    TrainerParts,
    is_step_of,
    trainer_title,
)
from highwater.trainers.emitted import (
    Emitted,
    bytes_with_logits,
    comment,
    exceeds,
    refuse_several_machines,
    shape_here,
)


class Emit(Protocol):
    """Makes the configuration of one trainer."""

    def __call__(
        self, found: Recommendation, chosen: Candidate, *, model_path: str | None = None
    ) -> Emitted:
        """The configuration of ``chosen``. Raises UsageError if the trainer cannot express it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitTarget:
    """A trainer that ``emit --for`` writes for: how, and which settings it can say."""

    file: str
    """Name of the configuration's file, which the start command contains."""
    emit: Emit
    yours: tuple[str, ...]
    """Things that the files leave to the user, for the page of things to check."""
    predicted_for: TrainerName
    """The trainer whose step is predicted: its own if ``is_step_of`` says so (this engine, if its
    own formula does not cover the question), else one to compare with: verl's actor for trainers
    with GRPO in whole logits, or this engine."""
    package: str | None = None
    """Name of the trainer's package; None: the target's name."""
    is_in_guides: bool = True
    """False: guide pages, to stay small, have no configuration of it for every length."""
    before: tuple[str, ...] = ()
    """Shell lines that have to run before the start command."""
    knows: frozenset[str]
    """Settings, by the names that users type, that the configuration sets or declares impossible.
    Others have to be at their defaults, so that a new setting is refused until it is listed."""


OF_ALL = frozenset(
    (
        *("ulysses", "strategy", "allocator", "offload", "objective", "rope", "entropy"),
        *("sequences_per_micro_batch", "token_budget"),
        *("save_hf", "checkpoint"),  # what is saved, and when, is the user's to add
    )
)
OF_LORA = {"lora", "lora_alpha", "lora_targets"}
OF_ROLLOUT = {*RolloutRequest.__struct_fields__}
OF_THE_ENGINE = OF_ALL | {*("loss", "recompute", "micro_batches", "ring", "copies")}

TARGETS: Mapping[Target, EmitTarget] = TrainerParts(Target, "TARGET")
"""The targets, by the names that ``highwater emit --for`` takes."""


def refuse_unknown_settings(
    target: Target, settings: Mapping[str, object], predicting: TrainerName
) -> None:
    """Raise UsageError, naming all settings that the predicted trainer's step lacks."""
    settings = {name: value for name, value in settings.items() if name != "host_memory"}
    refused = refused_settings(OURS if REGISTRY[predicting].trains_by else predicting, settings)
    refused += ["offload"] if settings.get("offload") == "states" else []
    knows = TARGETS[target].knows
    refused += [n for n in RolloutRequest.__struct_fields__ if n in settings and n not in knows]
    if settings.get("activations") == "auto" and "activations" not in knows:
        refused.append("activations")
    if refused:
        raise _without_words(target, {name: settings[name] for name in refused})


def refuse_drafts(target: Target, draft: Recommendation, *, model: str) -> None:
    """Raise the UsageError of the simplest candidate if no candidate can be configured."""
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
    """A candidate, and the configuration that was written for it."""

    candidate: Candidate
    emitted: Emitted


def configured_choice(
    target: Target, found: Recommendation, *, model: str, is_filled_in: bool = False
) -> Configured | None:
    """The simplest candidate that fits, that the trainer can express, and whose loss chunks the
    logits there; else the simplest with room for full logits, or the one that lacks the fewest
    bytes. None if no candidate fits.

    Raises the UsageError of the simplest candidate if the trainer can express none.
    """
    refused: UsageError | None = None
    whole: list[tuple[int, Configured]] = []
    room_bytes = found.device_bytes - found.reserved_bytes
    for each in found.candidates:
        if not each.fits or each.cell.settings.offloads_states:
            continue
        try:
            made = configured(target, found, each, model=model, is_filled_in=is_filled_in)
        except UsageError as error:
            refused = refused or error
            continue
        if made.logits_bytes is None:
            return Configured(each, made)
        lacks_bytes = 0
        if not is_step_of(found.trainer, target):
            lacks_bytes = bytes_with_logits(found, each, made.logits_bytes) - room_bytes
        whole.append((max(0, lacks_bytes), Configured(each, made)))
    if not whole and refused is not None:
        raise refused
    return min(whole, key=itemgetter(0))[1] if whole else None


def configured(
    target: Target,
    found: Recommendation,
    chosen: Candidate,
    *,
    model: str,
    is_filled_in: bool = False,
) -> Emitted:
    """Make one trainer's configuration. ``model``: as the user named it; a directory is written as
    its absolute path, a model of the Hub as its id; a catalog name as its id on the Hub if
    ``is_filled_in``, else not at all.

    Raises UsageError for settings that the trainer cannot express.
    """
    row = TARGETS[target]
    refuse_several_machines(chosen.cell.layout, found.device_name)
    # other trainers' offload of the optimizer moves it all back before the update (verl), or
    # updates on the host (DeepSpeed)
    if chosen.cell.settings.offloads_states:
        raise _without_words(target, {"offload": "states"})
    opened_as = model_place(model).opened_as or (hub_id_of(model) if is_filled_in else None)
    lora, shape = chosen.cell.settings.adapters, shape_here(found, opened_as)
    if lora is not None and shape is not None and expert_targets(shape.model_type, lora):
        raise UsageError(
            f"{target} has no adapters on experts, such as {lora.targets} of {shape.model_type}",
            hint=f"use `--lora-targets {','.join(ATTENTION)}`",
        )
    made = row.emit(found, chosen, model_path=opened_as)
    unknown = {name: n for name, n in named(chosen.cell).items() if name not in row.knows}
    if unknown:
        raise _without_words(target, unknown)
    if is_step_of(found.trainer, target):
        return made.replace(fits=chosen.fits)
    is_too_large = made.logits_bytes is not None and exceeds(found, chosen, made.logits_bytes)
    return made.replace(fits=False if is_too_large else None)


def hub_id_of(name: str) -> str | None:
    """The Hub id of a catalog model, preferably the one with this name; None if it has none."""
    known = catalog_model(name)
    if known is None:
        return None
    spelled, model = known
    named_so = (each for each in model.hub_ids if each.rpartition("/")[2] == spelled)
    return next(named_so, model.hub_id)


def _without_words(target: Target, unknown: Mapping[str, object]) -> UsageError:
    words = shlex.join(words_of(unknown))
    problem, hint = f"{trainer_title(target)}'s configuration has no words for", "leave `{}` out"
    needs_critic = [name for name, traits in TRAITS.items() if traits.critic]
    if "critic" in unknown or unknown.get("objective") in needs_critic:
        hint += ": what PPO and its critic take, `highwater predict` says of this engine alone"
    return UsageError(f"{problem} {words}", hint=hint.format(words))


def named(cell: Cell) -> dict[str, object]:
    """Settings and degrees of a cell that are not defaults, by the names that users type."""
    differs: dict[str, object] = {
        row.name: row.typed_for(getattr(cell.settings, row.sets))
        for row in DECLARED.values()
        if row.sets in cell.settings.named
    }
    return differs | {name: n for name, n in cell.layout.degree_settings.items() if n > 1}


LAUNCH, CHECK = "launch.sh", "CHECK.md"
_NEEDED = {"MODEL_PATH": "the directory of the model", "DATASET": "where prompts come from"}
"""Variables that a configuration may read, with words for bash, which must not have quotes."""
_FOLDERS = 1000
"""Most folder names that are tried."""


def launch_script(
    emitted: Emitted, *, file: str, said: Sequence[str], before: Sequence[str]
) -> str:
    """Shell script to start a training anywhere: ``said`` as comment, lines ``before``, command."""
    is_script = emitted.text.startswith("#!")
    command = f'bash {file} "$@"' if is_script else f'{emitted.command} "$@"'
    read = f"{emitted.text}{emitted.command}"
    lines = [
        "#!/usr/bin/env bash",
        comment(list(said)).rstrip("\n"),
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        "",
        *(
            f': "${{{name}:?export {name}={what}}}"'
            for name, what in _NEEDED.items()
            if any(form in read for form in (f"${name}", f"oc.env:{name}", f'environ["{name}"]'))
        ),
        *(f"export {name}={shlex.quote(value)}" for name, value in emitted.environment.items()),
        *before,
        f"exec {command}",
    ]
    return "\n".join(lines) + "\n"


def refuse_no_folder(folder: Path) -> None:
    """Raise UsageError if the path exists and is no folder."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(
            f"{folder} is there, and is no folder",
            hint=f"name another: `-o {shlex.quote(_free(folder))}`",
        )


def write_folder(folder: Path, files: Mapping[str, str]) -> tuple[Path, ...]:
    """Write the files into a folder, made if need be, and return all paths. Raises UsageError if a
    file exists with another content, MachineError if writing fails; then no new file is left.
    """
    refuse_no_folder(folder)
    others = [
        name
        for name, text in files.items()
        if os.path.lexists(folder / name) and not _holds(folder / name, text)
    ]
    if others:
        raise _taken_already(folder, others[0])
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            if not os.path.lexists(folder / name):
                _write(folder / name, text, made)
    except FileExistsError as error:  # made since the check above
        _remove(made)
        raise _taken_already(folder, Path(error.filename).name) from error
    except OSError as error:
        _remove(made)
        raise MachineError(
            f"{error.filename or folder} cannot be written: {error.strerror}",
            hint="name a folder that you may write to: `-o taken-away`",
        ) from error
    return tuple(folder / name for name in files)


def _write(path: Path, text: str, made: list[Path]) -> None:
    """Write a new file; a script is executable for all who may read it."""
    mode = 0o777 if path.suffix == ".sh" else 0o666
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    made.append(path)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode())


def _remove(made: Sequence[Path]) -> None:
    for path in made:
        path.unlink(missing_ok=True)


def _holds(path: Path, text: str) -> bool:
    """True if a file has exactly this content."""
    try:
        return read_file(path, most_bytes=SETTINGS_BYTES) == text.encode()
    except OSError:
        return False


def _taken_already(folder: Path, name: str) -> UsageError:
    return UsageError(
        f"{folder / name} is there already, with another content: nothing was written",
        hint=f"name a new folder: `-o {shlex.quote(_free(folder))}`",
    )


def _free(folder: Path) -> str:
    """The first of ``taken-away-2``, ``taken-away-3``, ... that does not exist."""
    plain = str(folder).rstrip("/") or "taken-away"
    names = (f"{plain}-{number}" for number in range(2, _FOLDERS))
    return next(name for name in names if not os.path.lexists(name))
