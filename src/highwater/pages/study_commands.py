"""Commands that repeat a study: its search, and a trial on each side of every edge. Also the line
of a trial that ran out of memory: the request that failed, the live bytes, the setting to try.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from highwater.errors import HighwaterError
from highwater.memory.snapshot.attribution import CATEGORY_WORDS, Category, LineRules
from highwater.memory.snapshot.memory_profile import Advice, advice_of
from highwater.memory.snapshot.snapshot import Frame
from highwater.model.model import Model, load_model
from highwater.nouns.codec import Record
from highwater.nouns.declaration import words_of
from highwater.nouns.environment import coordinates
from highwater.nouns.layout import Layout, flags_of
from highwater.nouns.request import DECLARED, setting_flags
from highwater.nouns.settings import Settings
from highwater.nouns.study import CellAnswer, Question, Study, usual_grid
from highwater.nouns.trainer import FOREIGN, ForeignTrainer
from highwater.nouns.trial import AliveMemory, Outcome, TrialResult, TrialSpec
from highwater.pages.text import plain
from highwater.units import GIB, MIB, format_bytes, format_tokens, parse_bytes

_STUDY_FLAG = "--study"
_TIMEOUT_FLAG = "--timeout"
_PROOF_FLAG = "--proof"
_PROMPT_FLAG = "--prompt-tokens"


class Command(Record, frozen=True, kw_only=True):
    """A command to type, and a description of it."""

    what: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The command as it is typed; the user's home is ``~``."""
        return " ".join(map(_typed, self.words))


def commands(study: Study) -> tuple[Command, ...]:
    """Commands of a study: its own as typed, its search in a new study, trials of its edges."""
    found: list[Command] = []
    if study.command:
        rest = "shows its answers again" if study.complete else "answers the rest"
        words = resumed(study)
        named = "" if words == study.command else ", but for the study's own file"
        what = f"as it was typed{named}: the same study, which {rest}"
        found.append(Command(what=what, words=words))
    name = f"{Path(study.path).stem if study.path else 'study'}-again.jsonl"
    anew = (*_without(_anew(study), _STUDY_FLAG), _STUDY_FLAG, name)
    found.append(Command(what="every trial anew, in a study of its own", words=anew))
    simulated = ("--dry-run",) if study.question.simulated else ()
    for answer in study.answers:
        where = answer.cell.label_on(study.question.device)
        for spec, what in _edge(study, answer):
            label = "memory-only, " if spec.is_memory_only else ""
            what = f"{where}: {format_tokens(spec.length_tokens)} tokens, {label}{what}"
            words = (*try_words(spec, study.question.model), *simulated)
            found.append(Command(what=what, words=words))
    return tuple(found)


def _anew(study: Study) -> tuple[str, ...]:
    """The search as it was typed, with the timeout and prompt that its trials had."""
    typed, limit_s = study.command, study.longest_timeout_s
    if typed[:2] != ("highwater", "find"):
        return find_words(study.question.replace(timeout_s=limit_s))
    typed = (*_without(typed, _PROMPT_FLAG), *_words(prompt_tokens=_prompt_tokens(study.question)))
    if limit_s == study.question.timeout_s:
        return _with_its_proof(study.question, typed)
    kept = _without(_without(typed, _TIMEOUT_FLAG), _PROOF_FLAG)
    return (*kept, _PROOF_FLAG, study.question.proof, _TIMEOUT_FLAG, f"{limit_s:g}s")


def resumed(study: Study) -> tuple[str, ...]:
    """The command that continues a study in the file that was read."""
    typed = study.command
    if study.path is None or typed[:1] != ("highwater",):  # the published program has no such flag
        return typed
    typed = _with_its_proof(study.question, typed)
    named = flag_value(_STUDY_FLAG, typed)
    if named is not None and Path(named).absolute() == Path(study.path).absolute():
        return typed
    return (*_without(typed, _STUDY_FLAG), _STUDY_FLAG, study.path)


def _with_its_proof(question: Question, typed: tuple[str, ...]) -> tuple[str, ...]:
    """Add the flag for full proof to old commands, which always proved in full."""
    is_named = any(flag_value(flag, typed) for flag in (_PROOF_FLAG, _TIMEOUT_FLAG))
    in_full = question.proof == "full" and question.device == "cuda" and not question.simulated
    return (*typed, _PROOF_FLAG, "full") if in_full and not is_named else typed


def flag_value(flag: str, words: Sequence[str]) -> str | None:
    """Value of a flag in the typed words, the last one if it is repeated; None if it is missing."""
    found: str | None = None
    for word, after in pairwise((*words, "")):
        if word == flag:
            found = after
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _edge(study: Study, answer: CellAnswer) -> Iterator[tuple[TrialSpec, str]]:
    specs: dict[int, TrialSpec] = {}
    for spec, _ in study.told_by(answer.cell):
        specs.setdefault(spec.length_tokens, spec)
    proof = None if answer.memory_only is None else answer.memory_only.length_tokens
    ends = (
        (answer.capacity_tokens, "fit"),
        (proof, "fit"),
        (answer.does_not_fit_tokens, "did not"),
    )
    yield from ((specs[tokens], what) for tokens, what in ends if tokens in specs)


def try_words(spec: TrialSpec, model: Model) -> tuple[str, ...]:
    """``highwater try`` with exactly the trial of a specification."""
    return (
        *("highwater", "try", _model_word(model), *_words(length=spec.length_tokens)),
        *_place(spec, spec.layout.flags),
        *_setting_flags([spec.settings], spec.foreign),
        *spec.hyperparameters.flags,
        *_steps(spec),
        *_words(attention_depth=spec.attention_depth),
    )


def find_words(question: Question) -> tuple[str, ...]:
    """``highwater find`` for exactly this question, for a study that Python code started."""
    grid, limit_s = question.grid, question.timeout_s
    usual = usual_grid(grid.native_length_tokens)
    steps = (grid.step_tokens, grid.beyond_step_tokens)
    is_published = steps == (usual.step_tokens, usual.beyond_step_tokens)
    proof = _with_its_proof(question, ())
    if limit_s is not None:
        proof = (_PROOF_FLAG, question.proof, _TIMEOUT_FLAG, f"{limit_s:g}s")
    return (
        *("highwater", "find", _model_word(question.model)),
        *_place(question, flags_of(cell.layout for cell in question.cells)),
        *_setting_flags([cell.settings for cell in question.cells], question.foreign),
        *question.hyperparameters.flags,
        *_words(
            start_length=grid.start_tokens,
            max_length=grid.max_tokens,
            resolution=None if is_published else grid.step_tokens,
            method=question.method,
            confirm=question.confirm or None,
            headroom=question.margin_bytes or None,
        ),
        *_steps(question),
        *proof,
        *_words(dry_run=question.simulated or None),
    )


def _place(asked: TrialSpec | Question, layout: Sequence[str]) -> tuple[str, ...]:
    foreign = () if asked.foreign is None else asked.foreign.flags
    return ("--device", asked.device, *layout, *_memory(asked.memory_budget_bytes), *foreign)


def _setting_flags(rungs: Sequence[Settings], foreign: ForeignTrainer | None) -> tuple[str, ...]:
    """Flags of settings that all rungs share, without allocator and loss if these differ."""
    apart = (name for name in ("allocator", "loss") if len({getattr(r, name) for r in rungs}) > 1)
    refused = () if foreign is None else FOREIGN[foreign.trainer].refused(DECLARED)
    return setting_flags(rungs[0], but_not={*apart, *refused})


def _model_word(model: Model) -> str:
    """The model's catalog name if the catalog's configuration is equal, else its directory."""
    with suppress(HighwaterError):
        if load_model(model.name).config_digest == model.config_digest:
            return model.name
    return model.directory


def _memory(budget_bytes: int | None) -> tuple[str, ...]:
    """``--memory`` with a text that parses to exactly this number of bytes; empty for None."""
    if budget_bytes is None:
        return ()
    gib, mib = budget_bytes / GIB, budget_bytes / MIB
    for text in (f"{gib:g}GiB", f"{gib:.2f}GiB", f"{mib:g}MiB"):
        if "e" not in text.removesuffix("iB") and parse_bytes(text) == budget_bytes:
            return "--memory", text
    return "--memory", str(budget_bytes)


def _steps(asked: TrialSpec | Question) -> tuple[str, ...]:
    return _words(
        steps=None if asked.steps == 2 else asked.steps,
        # the settings' flags name a single micro-batch
        micro_batches=asked.micro_batches if asked.micro_batches > 2 else None,
        data=asked.data,
        prompt_tokens=_prompt_tokens(asked),
    )


def _prompt_tokens(asked: TrialSpec | Question) -> int | None:
    """Prompt tokens of the sequences for ``--prompt-tokens``; None: leave the flag out."""
    return asked.prompt_tokens or None if asked.foreign is None else None


def _words(**values: object) -> tuple[str, ...]:
    """Command-line flags that set these fields; None values are left out."""
    return tuple(words_of({name: value for name, value in values.items() if value is not None}))


def _without(words: Sequence[str], flag: str) -> tuple[str, ...]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == flag:
            next(rest, None)
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return tuple(kept)


def _typed(word: str) -> str:
    """Quote a word for a shell; a path in the user's home begins with ``~``."""
    home, path = Path(os.environ.get("HOME", "~")), Path(word)
    if home.is_absolute() and home != Path("/") and home in path.parents:
        return f"~/{shlex.quote(str(path.relative_to(home)))}"
    return shlex.quote(word)


_SHORT: Mapping[Category, str] = {
    **CATEGORY_WORDS,
    "activations": "activations and temporaries",
    "logits": "logits",
    "backward_pass": "the backward pass",
}
"""Names of categories in the line of a trial that ran out."""
_PLACE = re.compile(r"(\S+\.py):(\d{1,9}) (.+)")
TRIED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? [KMG]iB)")
"""Size in the message of PyTorch's caching allocator."""
_ADVICE = re.compile(r"(Tried to allocate \d+(?:\.\d+)? [KMG]iB)\. .*", re.DOTALL)
"""The rest of that message, further figures and advice, which the log has."""
_LEAST_FRAGMENTED = 50
"""Fragmented memory is mentioned if it is above this part, a fiftieth, of the reserved memory."""


def request_line(result: TrialResult, settings: Settings, layout: Layout) -> str | None:
    """Line on the rank that ran out first: ``forward: no room for 17.97 GiB of logits``."""
    failure = result.first_failed.failure if result.first_failed else None
    if failure is None or failure.alive is None:
        return None
    alive = failure.alive
    sizes = sizes_of(alive)
    asked = _category(alive.requested_by)
    room = "" if alive.requested_bytes is None else f" for {format_bytes(alive.requested_bytes)}"
    told = [f"no room{room}{f' of {_SHORT[asked]}' if room and asked else ''}"]
    largest = max(sizes, key=lambda category: sizes[category])
    if sizes[largest]:
        told.append(f"{_SHORT[largest]} {format_bytes(sizes[largest])} alive")
    fragmented = alive.fragmented_bytes
    if fragmented is not None and fragmented * _LEAST_FRAGMENTED > (alive.reserved_bytes or 0):
        told.append(f"{format_bytes(fragmented)} fragmented")
    advice = setting_of(alive, settings, layout)
    layer = "" if failure.layer is None else f" of layer {failure.layer}"
    where = f"{plain(failure.phase)}{layer}"
    return f"{where}: {'; '.join(told)}{f' → {advice}' if advice else ''}"


def brief(reason: str) -> str:
    """A reason without the allocator's further figures and advice."""
    return _ADVICE.sub(r"\1", reason)


def requested_bytes(result: TrialResult) -> int | None:
    """Bytes of the request that failed, by the engine or by the error's text; None: unknown."""
    failure = result.first_failed.failure if result.first_failed else None
    if failure is None or result.outcome is not Outcome.OUT_OF_MEMORY:
        return None
    if failure.alive is not None and failure.alive.requested_bytes is not None:
        return failure.alive.requested_bytes
    said = TRIED.search(failure.text)
    return None if said is None else parse_bytes(said[1])


def setting_of(alive: AliveMemory, settings: Settings, layout: Layout) -> Advice | None:
    """The setting to try first that is not set yet; None if there is none."""
    sizes = sizes_of(alive)
    asked = _category(alive.requested_by)
    if asked is not None:
        sizes[asked] = sizes.get(asked, 0) + max(0, alive.requested_bytes or 0)
    # on the CPU only states are counted, which would always be the most
    is_whole = alive.allocated_bytes is not None
    has: dict[Advice, bool] = {
        "expandable segments": settings.allocator == "expandable",
        "chunked loss": settings.loss == "chunked",
        "recompute": settings.recompute != "none",
        "fewer copies": not is_whole or layout.replicate_degree == 1,
        "one-micro-batch": not is_whole or not settings.keeps_gradients,
        "offload": not is_whole or settings.offloads_model,
    }
    return advice_of(
        sizes,
        requested_bytes=alive.requested_bytes,
        free_bytes=alive.fragmented_bytes,
        tried=[advice for advice, is_set in has.items() if is_set],
    )


def sizes_of(alive: AliveMemory) -> dict[Category, int]:
    """Live bytes by category; 0 if unknown."""
    return {
        "parameters": alive.parameters_bytes,
        "gradients": alive.gradients_bytes,
        "optimizer_states": alive.optimizer_states_bytes,
        "activations": alive.activations_bytes or 0,
        "logits": alive.logits_bytes or 0,
        "communication": alive.communication_bytes or 0,
        "unattributed": alive.unattributed_bytes or 0,
    }


def alive_rows(result: TrialResult, layout: Layout) -> Mapping[str, str]:
    """Allocated memory of each rank that ran out, by the rank's coordinates in the mesh."""
    rows: dict[str, str] = {}
    for rank in result.ranks:
        alive = None if rank.failure is None else rank.failure.alive
        if alive is not None:
            parts = [
                f"{_SHORT[category]} {format_bytes(size)}"
                for category, size in sizes_of(alive).items()
                if size
            ]
            if alive.fragmented_bytes is not None:
                parts.append(f"fragmented {format_bytes(alive.fragmented_bytes)}")
            place = f", {coordinates(layout, rank.rank)}" if layout.gpus > 1 else ""
            rows[f"alive on rank {rank.rank}{place}"] = ", ".join(parts)
    return rows


def _category(requested_by: str | None) -> Category | None:
    """Category of the memory that a source line (``file:line function``) allocates."""
    place = None if requested_by is None else _PLACE.fullmatch(requested_by)
    if place is None:
        return None
    return LineRules().category(Frame(file=place[1], line=int(place[2]), name=place[3]))
