"""Writes the page that answers ``predict`` without a server: thirty models on six kinds of GPU, all
parameters, LoRA and QLoRA, with every answer in it, and what a static Space needs beside it.

``make page`` runs it, in some minutes, and writes build/page: ``index.html`` opens from a disk, and
the folder is a static Space of the Hub as it is.
"""

import argparse
import gzip
import sys
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import msgspec
from answers import GPUS, MODELS, Answered, simplest_by_length, trainings
from markupsafe import Markup

from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction
from highwater.memory.question import memory_limit_of
from highwater.model.model import load_model
from highwater.nouns.declaration import words_of
from highwater.nouns.environment import ENV_BEFORE_IN_WORDS, ENV_IN_WORDS
from highwater.nouns.recommendation import Alternative, Candidate, Recommendation
from highwater.nouns.study import RISK_IN_WORDS
from highwater.nouns.trainer import known_runs
from highwater.pages.chooser import Answer, ChooserPlace, chooser_json, configurations
from highwater.pages.page import digest, drawn_page, page_script
from highwater.pages.prediction_tables import caveat
from highwater.pages.table import TextTable
from highwater.recommendation.candidates import first_fit
from highwater.recommendation.recommend import goal_of, recommend
from highwater.trials.probe import gpus_meant
from highwater.units import format_bytes, format_seconds, format_tokens
from highwater.version import __version__

ROOT = Path(__file__).resolve().parents[1]
COUNTS = (1, 2, 4, 8)
LENGTHS = tuple(4096 << doubled for doubled in range(9))
"""Up to a million tokens; each model's native length besides."""
MOST_BYTES = 5_000_000
"""What the page may take, which is sent whole."""
CONFIGURED: tuple[Literal["accelerate", "axolotl", "llamafactory"], ...] = (
    "accelerate",
    "axolotl",
    "llamafactory",
)
"""Trainers whose configurations stand beside the command of highwater's own."""
TITLE = "How long a context can you train?"
PROSE = (
    f"Every figure is **predicted**, by highwater {__version__}: nothing was run. A length fits "
    "only where even the pessimistic end of the prediction is below the GPU's memory.",
    f"{RISK_IN_WORDS[0].upper()}{RISK_IN_WORDS[1:]}.",
    "Lengths are powers of two and the model's native length; one between is answered by the next "
    "longer. Training is SFT by highwater's own engine with AdamW, one sequence a micro-batch. "
    "Host memory is what machines with such GPUs usually have.",
    "A trial tells more than a prediction: `highwater try` runs one on your GPUs, and `highwater "
    "find` searches the longest length there.",
)
"""Paragraphs below the answer."""
SPACE = """\
---
title: How long a context can you train?
sdk: static
app_file: index.html
---

The settings, memory and speed of training at long context, predicted: every answer is in
`index.html`, which asks no server. `make page` in a checkout of highwater writes it.
"""


def places_of(
    model: str, *, gpus: Sequence[str] = GPUS, counts: Sequence[int] = COUNTS
) -> tuple[ChooserPlace, ...]:
    """The answers about one model, on every kind and number of GPUs."""
    lengths = {*LENGTHS, load_model(model).shape.native_length_tokens}
    found: list[ChooserPlace] = []
    for kind, count in product(gpus, counts):
        for training, settings in trainings(model, count).items():
            where = f"{count}x{kind}"
            asked = ("highwater", "predict", model, "--gpus", where, *words_of(settings))
            told = simplest_by_length(model, where, lengths, settings, with_others=True)
            configured = _Configurations(model, where, settings)
            answers = tuple(_answer(each, " ".join(asked), configured) for each in told)
            fits = [a.found.length_tokens for a in answers if _is_safe(a.found.chosen)]
            found.append(
                ChooserPlace(
                    model_name=model,
                    device_name=kind,
                    gpus=count,
                    basis=training,
                    answers=answers,
                    longest_tokens=max(fits, default=None),
                )
            )
    return tuple(replace(each, answers=tuple(_with_more_gpus(each, found))) for each in found)


def _is_safe(chosen: Candidate | None) -> bool:
    return chosen is not None and chosen.risk == "safe"


class _Configurations:
    """What ``emit`` prints for the trainers of the page: by the step that all of them compose, or
    where its law says nothing, compared with this engine. Lengths are asked in order.
    """

    def __init__(self, model: str, where: str, settings: Mapping[str, Any]) -> None:
        self._model, self._where, self._settings = model, where, settings
        self._has_room = True
        """False: a shorter length has no room in that step, so that no longer one has."""

    def __call__(self, found: Recommendation) -> Mapping[str, str]:
        """The texts for a length, by the trainer, this engine's command first."""
        if found.chosen is None:
            return {}
        texts, own = dict(configurations(found, self._model, ())), found
        with suppress(UsageError):
            composed = self._composed(found.length_tokens)
            if composed is None:
                return texts
            own = composed
        for target in CONFIGURED:
            of_target = own
            if own is not found:
                said = own.accuracy.replace(known_runs(CONFIGURED[0]), known_runs(target))
                of_target = msgspec.structs.replace(own, trainer=target, accuracy=said)
            texts |= configurations(of_target, self._model, (target,))
        return texts

    def _composed(self, length_tokens: int) -> Recommendation | None:
        """The recommendation by that step; None where nothing fits, UsageError by no law."""
        where = gpus_meant(self._where, None)
        limit = memory_limit_of(where, host_memory=None, reserved=0)
        goal = goal_of(self._model, length_tokens, where, limit, CONFIGURED[0], self._settings, 0)
        own = first_fit(goal) if self._has_room else None
        self._has_room = own is not None and own.fits
        if not self._has_room:
            return None
        asked = {"length": length_tokens, "gpus": self._where, "trainer": CONFIGURED[0]}
        return recommend(self._model, **asked, **self._settings)


def _answer(answered: Answered, asked: str, configured: _Configurations) -> Answer:
    found, predicted = answered
    chosen, tables = found.chosen, ()
    if chosen is not None and predicted is not None:
        tables = tuple(_tables(found, chosen, predicted))
    return Answer(
        found=found,
        command=f"{asked} --length {found.length_tokens}",
        entries=(),
        configurations=configured(found),
        tables=tables,
    )


def _tables(
    found: Recommendation, chosen: Candidate, predicted: CellPrediction
) -> Iterator[TextTable]:
    """What to set and what it takes; and the bytes of a GPU at the peak, by what they are."""
    footprint, step = predicted.footprint, chosen.step_time
    rows = {
        "settings": chosen.cell.words,
        "memory of each GPU": f"{format_bytes(footprint.needed_bytes)} needed of "
        f"{format_bytes(found.device_bytes)}: {chosen.risk}",
        "host memory": format_bytes(chosen.host_bytes) if chosen.host_bytes else "",
        "speed": step
        and f"{step.tokens_per_s:,.0f} tokens/s, {format_seconds(step.time_s)} a step "
        f"of {format_tokens(step.step_tokens)} tokens",
        "environment": f"{ENV_IN_WORDS}, before any process starts; {ENV_BEFORE_IN_WORDS}"
        if chosen.cell.settings.allocator == "expandable"
        else "nothing to set",
        "positions": _positions(found),
    }
    yield TextTable(
        title="Settings, memory and speed, predicted",
        columns=(),
        rows=tuple((name, value) for name, value in rows.items() if value),
        left_columns=2,
    )
    terms = sorted((term for term in footprint.used if term.bytes), key=lambda term: -term.bytes)
    yield TextTable(
        title=f"In use on a GPU at its peak, {footprint.peak.name}, predicted",
        columns=(),
        rows=tuple((term.name, format_bytes(term.bytes)) for term in terms),
        left_columns=1,
        footnotes=(caveat(chosen, [chosen.cell], unlike=found.unlike, star=()),),
    )


def _positions(found: Recommendation) -> str:
    if found.yarn is None:
        return f"as the model has them, up to {format_tokens(found.native_length_tokens)}"
    block = ", ".join(f"{name}: {value}" for name, value in found.yarn.rope_parameters.items())
    return f"YaRN, stretched {found.yarn.factor:.3g} times, rope_parameters {{{block}}}"


def _with_more_gpus(place: ChooserPlace, every: Sequence[ChooserPlace]) -> Iterator[Answer]:
    """The answers of a place; where nothing fits, with the fewest GPUs of its kind that would."""
    for answer in place.answers:
        found = answer.found
        if found.chosen is None:
            more = (
                Alternative(
                    kind="more GPUs",
                    what=f"{other.gpus} x {other.device_name}",
                    label=chosen.label,
                    cell=chosen.cell,
                    headroom_bytes=chosen.headroom_bytes,
                    host_bytes=chosen.host_bytes,
                )
                for other in every
                if (other.device_name, other.basis) == (place.device_name, place.basis)
                for each in other.answers
                if each.found.length_tokens == found.length_tokens
                and (chosen := each.found.chosen) is not None
            )
            found = msgspec.structs.replace(found, alternatives=tuple(islice(more, 1)))
        yield replace(answer, found=found)


def page(places: Sequence[ChooserPlace]) -> str:
    """The whole page: a chooser and nothing else, its answers compressed, above how to read it."""
    script, answers = page_script("chooser.js"), chooser_json(places, fields=("notes",))
    return drawn_page(
        "answers.html.j2",
        title=TITLE,
        prose=PROSE,
        data=Markup(b64encode(gzip.compress(answers.encode(), mtime=0)).decode()),  # noqa: S704
        script=script,
        script_digest=digest(script),
    )


def main() -> None:
    """Write the page and the Space's description."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "build" / "page")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names of the catalog")
    arguments = parser.parse_args()
    with ProcessPoolExecutor() as processes:
        places = [place for own in processes.map(places_of, arguments.models) for place in own]
    whole = page(places)
    if len(whole) > MOST_BYTES:
        parser.error(f"the page would take {len(whole):,} bytes: name fewer `--models`")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("index.html", whole), ("README.md", SPACE)):
        (arguments.directory / name).write_text(text, encoding="utf-8")
    count = sum(len(place.answers) for place in places)
    sys.stdout.write(f"{arguments.directory}: {count:,} answers\n")


if __name__ == "__main__":
    main()
