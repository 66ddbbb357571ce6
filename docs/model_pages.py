"""A page a popular model: what it takes to train it by length, on six kinds of GPU, the settings,
what goes wrong without saying so, and what was measured of it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

from answers import GPUS, MODELS, RANK, Answered, simplest_by_length, trainings

from highwater.model.model import Model, load_model
from highwater.model.rope import YARN_IN_USE, ends_at_native, unscalable
from highwater.nouns.capacities import study_capacities
from highwater.nouns.cells import heads_obstacle
from highwater.nouns.codec import from_builtins
from highwater.nouns.declaration import words_of
from highwater.nouns.request import setting_flags
from highwater.nouns.settings import NOTHING_SET, shared_training, short_settings
from highwater.nouns.study import Cell, counted_ranks
from highwater.nouns.trainer import OURS
from highwater.store.journal import read_study
from highwater.units import format_bytes, format_tokens

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = (8192, 32_768, 131_072, 524_288)
"""Lengths of a page's tables; the native length besides."""
MOST_GPUS = 8
_ON_ONE = 2e9, 40e9
"""Parameters up to which a page has training on one GPU: of all of them, and of adapters."""
_MANY_ENTRIES = 100_000
"""Vocabulary from which whole logits are a trap."""
STUDIES = "docs/results/find/*.jsonl"
SEARCHES = "docs/results/find/budget/*.json"
"""Records of searches: journals, and the answers of ``find --json``."""


class Measured(NamedTuple):
    """The edge that trials found: what fits, and what does not."""

    where: str
    cell: Cell
    fits_tokens: int
    """The longest that was trained in full."""
    held_tokens: int | None
    """The longest that memory holds, by memory-only trials; None: none was made."""
    fails_tokens: int | None
    record: str
    """Its file, below docs/results."""


class Table(NamedTuple):
    """What a kind of training takes, by length and kind of GPU."""

    gpus: int
    training: str
    rows: Mapping[int, Sequence[Answered]]
    """An answer for each of ``GPUS``, by length."""


def model_pages() -> dict[str, str]:
    """The page of every model and their index, by the path below docs/."""
    measured = _measured()
    with ProcessPoolExecutor() as processes:
        tables = dict(zip(MODELS, processes.map(_tables, MODELS), strict=True))
    pages = {
        f"models/{name}.md": "\n".join(_page(load_model(name), tables[name], measured[name]))
        for name in MODELS
    }
    return {"models/README.md": "\n".join(_index(tables, measured)), **pages}


def _tables(name: str) -> tuple[Table, Table]:
    """What all parameters take, and what adapters do."""
    shape = load_model(name).shape
    lengths = {*LENGTHS, shape.native_length_tokens}
    tables: list[Table] = []
    for index, most in enumerate(_ON_ONE):
        gpus = 1 if shape.parameters <= most else MOST_GPUS
        training, settings = list(trainings(name, gpus).items())[index]
        told = [
            list(simplest_by_length(name, f"{gpus}x{kind}", lengths, settings)) for kind in GPUS
        ]
        by_length = zip(*told, strict=True)
        rows = {each[0].found.length_tokens: each for each in by_length}
        tables.append(Table(gpus, training, rows))
    return tables[0], tables[1]


def _page(model: Model, tables: Sequence[Table], measured: Sequence[Measured]) -> Iterator[str]:
    name, shape, full = model.name, model.shape, tables[0]
    native, sizes = format_tokens(shape.native_length_tokens), f"{shape.parameters / 1e9:,.2f}"
    yield f"# {name}"
    yield ""
    yield f"{sizes} billion parameters, native length **{native} tokens**. {_first(model, full)}"
    yield ""
    yield (
        "In the tables: memory that each GPU needs at the peak, tokens a second over all GPUs, and "
        "the settings by their letter. **Predicted**: nothing was run. `-`: it does not fit; `?`: "
        "only a trial can tell. Training is SFT, one sequence a micro-batch, AdamW, by highwater's "
        "engine; [what fits means](../guides/predict.md#does-this-length-fit)."
    )
    cells = dict.fromkeys(
        each.found.chosen.cell
        for table in tables
        for row in table.rows.values()
        for each in row
        if each.found.chosen is not None
    )
    words = dict.fromkeys(_words(cell) for cell in cells)
    letters = dict(zip(words, _letters(), strict=False))
    for table in tables:
        yield from _table(table, letters)
    yield from ("", "## Settings", "")
    for letter_words, letter in letters.items():
        yield f"- **{letter}**: {letter_words}"
    yield from _commands(name, full)
    yield from ("", "## Traps", "")
    yield from (f"- {trap}" for trap in _traps(model))
    yield from _records(name, measured)


def _first(model: Model, full: Table) -> str:
    """How far all parameters train on the GPUs of the table, in a sentence."""
    native = model.shape.native_length_tokens
    kinds = [
        each.found.device_name
        for each in full.rows[native]
        if each.found.chosen is not None and each.found.chosen.risk == "safe"
    ]
    where = "one GPU" if full.gpus == 1 else f"{full.gpus} GPUs"
    on = f"on {where} of {_listed(kinds)}" if kinds else "on none of these GPUs"
    return f"All parameters train at this length {on}, predicted."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _letters() -> Iterator[str]:
    yield from ascii_lowercase
    yield from (first + second for first in ascii_lowercase for second in ascii_lowercase)


def _words(cell: Cell) -> str:
    """Settings in words, and what to type for them; adapters are in the heading of the table."""
    told = short_settings(cell.settings, but=shared_training([cell.settings]))
    flags = setting_flags(cell.settings, but_not=("lora", "lora_targets"))
    degrees = cell.layout.degrees
    words = ", ".join(degrees if degrees and told == NOTHING_SET else (told, *degrees))
    return f"{words}: `{' '.join((*flags, *_degrees(cell)))}`"


def _degrees(cell: Cell) -> Iterable[str]:
    return words_of(cell.layout.degree_settings) if cell.layout.context_degree > 1 else ()


def _table(table: Table, letters: Mapping[str, str]) -> Iterator[str]:
    trained = "All parameters" if table.training == "all parameters" else table.training
    yield from ("", f"## {trained}, {counted_ranks(table.gpus, 'cuda')}", "")
    yield f"| tokens | {' | '.join(GPUS)} |"
    yield f"|---:|{'---|' * len(GPUS)}"
    for tokens, row in table.rows.items():
        yield f"| {format_tokens(tokens)} | {' | '.join(_entry(each, letters) for each in row)} |"


def _entry(answered: Answered, letters: Mapping[str, str]) -> str:
    chosen, predicted = answered.found.chosen, answered.predicted
    if chosen is None or predicted is None:
        return "-"
    speed = f", {chosen.step_time.tokens_per_s:,.0f}/s" if chosen.step_time else ""
    unsure = "?" if chosen.risk == "tight" else ""
    used = format_bytes(predicted.footprint.needed_bytes)
    return f"{used}{unsure}{speed}, {letters[_words(chosen.cell)]}"


def _commands(name: str, full: Table) -> Iterator[str]:
    """What to type for a length of one's own."""
    where = f"{name} --gpus {full.gpus}xH100-80GB"
    yield ""
    yield (
        f"Ask for any other length and GPUs: `highwater predict {where} --length 32k`, with "
        f"`--lora {RANK}{_targets(name)}` for adapters. `highwater emit --for axolotl {where} "
        "--length 8k` writes a configuration, of TRL, LLaMA-Factory and others too."
    )


def _targets(name: str) -> str:
    settings = list(trainings(name, 1).values())[1]
    return f" --lora-targets {settings['lora_targets']}" if "lora_targets" in settings else ""


def _traps(model: Model) -> Iterator[str]:
    """What is easily got wrong, from the model's own shape."""
    shape = model.shape
    native = format_tokens(shape.native_length_tokens)
    why = unscalable(model)
    if why is not None:
        yield f"**Positions end at {native} tokens:** {why}. Longer lengths are refused."
    elif ends_at_native(model, "auto"):
        yield (
            f"**Positions end at {native} tokens:** the model scales its own RoPE up to there. "
            "Longer lengths are refused; `--rope yarn` scales anew from what it had before."
        )
    else:
        yield (
            f"**Past {native} tokens positions are stretched by YaRN,** length / {native} times; "
            f"published models go up to {YARN_IN_USE}. That a length fits says nothing of what the "
            "model learns there: evaluate it."
        )
    layers = [(run.count, run.kind.attention) for run in shape.runs]
    windows = {kind.window_tokens for _, kind in layers if kind.window_tokens is not None}
    if windows:
        near = sum(count for count, kind in layers if kind.window_tokens is not None)
        yield (
            f"**{near} of {shape.layers} layers read the last {format_tokens(min(windows))} tokens "
            "alone.** A ring shares documents only as long as the window; Ulysses shares any."
        )
    caps = {kind.soft_cap for _, kind in layers if kind.soft_cap is not None}
    if caps:
        yield (
            f"**Scores of attention are capped at {max(caps):g}:** a kernel that leaves that out "
            "computes another model, and a ring is refused."
        )
    if any(kind.has_sinks for _, kind in layers):
        yield (
            "**Each head has a sink,** a learned number in the softmax: a kernel that leaves it "
            "out computes another model."
        )
    if shape.experts > 1:
        is_in = "is in the loss" if shape.balanced_experts else "is not in the loss"
        yield (
            f"**Router loss:** by its config.json (`output_router_logits`, `router_aux_loss_coef`) "
            f"it {is_in}, as in transformers; other trainers may add it. Memory is that of all "
            f"{shape.experts} experts, speed that of the {shape.experts_per_token} a token goes to."
        )
        yield (
            "**LoRA of the table is on attention alone.** `--lora-targets` can name the layers of "
            "experts too; they do not go into NF4, so that QLoRA is refused."
        )
    if shape.vocab_size >= _MANY_ENTRIES:
        logits = format_bytes(2 * shape.vocab_size * 32_768)
        yield (
            f"**A vocabulary of {shape.vocab_size:,}:** whole logits of 32,768 tokens are {logits} "
            "in bf16 alone; `--loss chunked` holds a chunk of them."
        )
    degrees = [each for each in (1, 2, 4, 8) if heads_obstacle(shape, each) is None]
    if max(degrees) < MOST_GPUS:
        ring = MOST_GPUS // max(degrees)
        beyond = "" if caps or windows else f"; for 8, `--ulysses {max(degrees)} --ring {ring}`"
        yield (
            f"**Heads share a sequence among {max(degrees)} GPUs at the most** "
            f"({shape.query_heads} query, {shape.kv_heads} key/value heads){beyond}."
        )


def _records(name: str, measured: Sequence[Measured]) -> Iterator[str]:
    yield from ("", "## Measured", "")
    if not measured:
        yield (
            f"No search of this model is recorded here. `highwater find {name}` makes one on your "
            "GPUs, and `highwater try` runs one trial."
        )
        return
    yield (
        "Edges of SFT with all parameters, by real trials. *Trained*: the longest that was trained "
        "in full in the time there was; *held*: the longest that memory holds, by "
        "[memory-only trials](../concepts/trials.md#memory-only-trials)."
    )
    yield ""
    yield "| on | settings | trained | held | ran out | record |"
    yield "|---|---|---:|---:|---:|---|"
    for each in measured:
        lengths = (each.fits_tokens, each.held_tokens, each.fails_tokens)
        figures = " | ".join("-" if n is None else format_tokens(n) for n in lengths)
        record = f"[{Path(each.record).name}](../results/{each.record})"
        yield f"| {each.where} | {each.cell.words} | {figures} | {record} |"


def _measured() -> dict[str, list[Measured]]:
    """Edges that are recorded, by model: on each number of GPUs the longest of each settings."""
    found: dict[str, list[Measured]] = {name: [] for name in MODELS}
    for name, each in (*_of_studies(), *_of_searches()):
        if name in found and each.fits_tokens and each.cell.settings.objective == "sft":
            found[name].append(each)
    return {name: list(_longest(own)) for name, own in found.items()}


def _of_studies() -> Iterator[tuple[str, Measured]]:
    for path in sorted(ROOT.glob(STUDIES)):
        study, record = read_study(path), str(path.relative_to(ROOT / "docs" / "results"))
        every = study_capacities(study)
        held = {each.cell: each.capacity_tokens for each in every if each.is_memory_only}
        for each in every:
            if not each.is_memory_only and each.trainer == OURS:
                where = f"{each.cell.layout.gpus} x {each.device_name}"
                edge = each.capacity_tokens, held.get(each.cell), each.does_not_fit_tokens
                yield each.model_name, Measured(where, each.cell, *edge, record)


def _of_searches() -> Iterator[tuple[str, Measured]]:
    for path in sorted(ROOT.glob(SEARCHES)):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        question = document["question"]
        record = str(path.relative_to(ROOT / "docs" / "results"))
        for cell, answer in zip(question["cells"], document["answers"], strict=False):
            edge = answer["capacity_tokens"], None, answer["does_not_fit_tokens"]
            made = from_builtins(cell, Cell)
            where = f"{made.layout.gpus} x H100-80GB"
            yield question["model"]["name"], Measured(where, made, *edge, record)


def _longest(every: Sequence[Measured]) -> Iterator[Measured]:
    best: dict[tuple[str, str], Measured] = {}
    for each in every:
        key = each.where, each.cell.words
        if key not in best or each.fits_tokens > best[key].fits_tokens:
            best[key] = each
    yield from sorted(best.values(), key=lambda each: (each.where, each.fits_tokens))


def _index(
    tables: Mapping[str, Sequence[Table]], measured: Mapping[str, Sequence[Measured]]
) -> Iterator[str]:
    yield "# Models"
    yield ""
    yield (
        "Thirty models that many train: memory, speed and settings by length on six kinds of GPU, "
        "and what to look out for. Lengths are **predicted**: the longest of the page's that is "
        "safe on so many H100s. `highwater models` lists the others, and a model's directory or id "
        "on the Hub asks about any."
    )
    yield ""
    yield "| model | parameters | native length | all parameters, H100-80GB | LoRA, H100-80GB | |"
    yield "|---|---:|---:|---:|---:|---|"
    for name in MODELS:
        shape = load_model(name).shape
        reached = (_reached(table) for table in tables[name])
        recorded = "measured, too" if measured[name] else ""
        yield (
            f"| [{name}]({name}.md) | {shape.parameters / 1e9:,.2f}B "
            f"| {format_tokens(shape.native_length_tokens)} | {' | '.join(reached)} | {recorded} |"
        )


def _reached(table: Table) -> str:
    """The longest length of the table that is safe on H100s."""
    column = GPUS.index("H100-80GB")
    safe = [
        tokens
        for tokens, row in table.rows.items()
        if (chosen := row[column].found.chosen) is not None and chosen.risk == "safe"
    ]
    return f"{format_tokens(max(safe))}, {table.gpus} x" if safe else "-"
