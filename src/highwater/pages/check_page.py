"""The page of a folder that is taken away, in Markdown: what was predicted, what the trainer does
otherwise, what is the user's to fill in, and what to look at before a long run.
"""

import json
from collections.abc import Sequence

from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import settings_in_words
from highwater.nouns.study import RISK_IN_WORDS
from highwater.nouns.trainer import step_in_words
from highwater.pages.text import plain
from highwater.trainers.emitted import Emitted
from highwater.units import counted, format_bytes, format_tokens

_STEPS = 10
"""Steps of a first run: the allocator's memory has long stopped to grow by then."""


def check_page(
    found: Recommendation,
    chosen: Candidate,
    emitted: Emitted,
    *,
    answer: str,
    name: str,
    package: str,
    yours: Sequence[str],
    command: str,
    roomier: str,
) -> str:
    """The page's text. ``answer``: what was found, in a sentence; ``yours``: what the files leave
    to the user; ``command``: what was typed, but for the folder; ``roomier``: what asks for more
    headroom.
    """
    steps = _first_run(found, chosen, emitted, name=name, package=package)
    gpus = f"{found.gpus} x {found.device_name}"
    title = f"{name}: {found.model_name}, {format_tokens(found.length_tokens)} tokens, {gpus}"
    parts = [
        f"# {title}",
        answer,
        "Start it with `./launch.sh`; what you type after it goes to the trainer. "
        f"Made by `{command}`.",
        f"## {'What was predicted' if emitted.fits else 'Not predicted for this trainer'}",
        _items(_predicted(found, chosen, emitted)),
        f"These numbers are {chosen.source} for {step_in_words(found.trainer)}.",
        f"## What {name} does otherwise",
        _otherwise(emitted, name=name),
        "## What is yours to fill in",
        _items([*yours, *_positions(found, emitted)]),
        "## Before the first long run",
        "\n".join(f"{n}. {plain(step)}" for n, step in enumerate(steps, start=1)),
        f"Where memory runs out, ask for {'more headroom' if emitted.fits else 'less of a GPU'}: "
        f"`{roomier}`.",
    ]
    return "\n\n".join(plain(part) if "\n" not in part else part for part in parts) + "\n"


def _predicted(found: Recommendation, chosen: Candidate, emitted: Emitted) -> list[str]:
    """What was found of the settings, a line each; of a trainer that is not predicted nothing of
    how sure it is, or how far it goes.
    """
    cell = chosen.cell
    words = settings_in_words(cell.settings, cell.layout, is_scaled=found.yarn is not None)
    lines = [f"settings: {words}, on {counted(found.gpus, 'GPU')}"]
    if chosen.risk is not None and emitted.fits:
        lines.append(f"how sure it is: {chosen.risk} ({RISK_IN_WORDS})")
    if chosen.headroom_bytes is not None and emitted.fits:
        used = found.device_bytes - found.reserved_bytes - chosen.headroom_bytes
        lines.append(
            f"headroom: {format_bytes(chosen.headroom_bytes)} of each GPU's "
            f"{format_bytes(found.device_bytes)}; {format_bytes(used)} needed at the peak"
        )
    if found.reserved_bytes:
        lines.append(f"left to others on each GPU: {format_bytes(found.reserved_bytes)}")
    if chosen.host_bytes:
        lines.append(f"host memory: {format_bytes(chosen.host_bytes)} of the machine")
    lines.append(
        f"a micro-batch: {chosen.cell.settings.sequences_per_micro_batch} x "
        f"{format_tokens(found.length_tokens)} tokens, {format_tokens(chosen.token_budget_tokens)} "
        "a GPU"
    )
    more = " or more" if chosen.is_at_least else ""
    if emitted.fits:
        lines.append(
            f"longest with these settings: {format_tokens(chosen.capacity_tokens)} tokens{more} "
            f"({chosen.capacity_source})"
        )
    return lines


def _otherwise(emitted: Emitted, *, name: str) -> str:
    """What the trainer has no words for."""
    if not emitted.cannot:
        return f"Nothing that is known: {name} has words for every setting above."
    return "It has no words for what follows, so its memory is another there.\n\n" + _items(
        emitted.cannot
    )


def _positions(found: Recommendation, emitted: Emitted) -> list[str]:
    """YaRN's block, where the model's own file has to have it."""
    if found.yarn is None or '# {"rope_parameters"' not in emitted.text:
        return []
    native = format_tokens(found.native_length_tokens)
    block = json.dumps(found.yarn.block)
    return [
        f"YaRN, past the {native} tokens that the model was made for: a copy of the model whose "
        f"`config.json` has `{block}`"
    ]


def _first_run(
    found: Recommendation, chosen: Candidate, emitted: Emitted, *, name: str, package: str
) -> list[str]:
    """What to look at, in its order."""
    steps = [
        f"`pip show {package}` says {emitted.checked_with}: other versions may have other names",
        f"every name that is read as it stands here: {name} says in its log what it made of them",
        f"{_STEPS} steps on documents of all {format_tokens(found.length_tokens)} tokens: shorter "
        "ones say nothing about memory",
    ]
    if chosen.headroom_bytes is not None:
        used = found.device_bytes - found.reserved_bytes - chosen.headroom_bytes
        whose = "a step" if emitted.fits else f"a step of {step_in_words(found.trainer)}"
        steps.append(
            f"`nvidia-smi` while they run: {format_bytes(used)} of each GPU is what {whose} was "
            "predicted to need; the allocator keeps what was freed, so that more may show, as long "
            "as nothing runs out"
        )
    return steps


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {plain(line)}" for line in lines)
