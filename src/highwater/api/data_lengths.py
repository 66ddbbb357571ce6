"""Document lengths of a user's data: what part of the data each context length keeps, and the time
and the money of one pass over it on some GPUs.

```python
import highwater

found = highwater.data_lengths("data.jsonl", "Qwen3-8B", gpus="8xH100-80GB", price=2.5)
for each in found.lengths:
    print(each.length_tokens, each.kept_tokens / found.tokens, each.epoch_s)
```
"""

import fileinput
import math
import os
import re
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from highwater.api.prediction import predict
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction
from highwater.memory.trainers import untimed
from highwater.model.model import load_model
from highwater.model.model_place import CONFIG
from highwater.nouns.codec import Record, from_json
from highwater.nouns.corpus import CorpusOrder, missing_files, whole_paths
from highwater.nouns.hardware import LIST_PRICE_NOTE, hour_dollars_of
from highwater.nouns.objective import TRAITS
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import OURS, REGISTRY
from highwater.nouns.trial import OnPhase, unheard
from highwater.speed import cost_of
from highwater.trials.inputs import tokenised
from highwater.units import MOST_TOKENS, parse_price, parse_share, parse_tokens

_USUAL = 8192
"""Shortest length of the answer, in tokens, if most documents are longer; else down to 1/8."""
_BYTES_PER_TOKEN = 4
"""Bytes of a token of English text, about, where there is no tokenizer to count. Source:
https://help.openai.com/en/articles/4936856-what-are-tokens-and-how-to-count-them"""
_COUNT = re.compile("((n|num|total)_)?tokens|token_count|((input|token|sequence)_)?length|seq_len")
_TEXT = re.compile("text|messages|conversations|input_ids|prompt|instruction|question|query|input")
"""Fields of which one may say how many tokens a record has, and those that are tokenised if any."""
_ROUND = 256
"""``whole_tokens`` is a multiple of so many tokens."""


class KeptLength(Record, frozen=True, kw_only=True):
    """What a context length keeps of a user's data, and the settings that train at it."""

    length_tokens: int
    documents: int
    """Documents of this length or shorter, which are trained whole."""
    kept_tokens: int
    """Tokens that are trained if the ends of longer documents are cut."""
    trained: CellPrediction | None = None
    """The settings that train the length; None: no GPUs were named, or nothing trains it."""
    epoch_s: float | None = None
    """Seconds of one pass over the kept tokens, as if each row were full of one document: tokens of
    short ones attend to fewer, and take less. None: unknown."""
    epoch_price: float | None = None
    """Price of that pass, in the unit of the price that was named or else in dollars."""


class DataLengths(Record, frozen=True, kw_only=True):
    """Lengths of the documents in a user's data, and what each context length keeps of them."""

    data: tuple[str, ...]
    tokenizer: str
    """The tokenizer's class; ``bytes``: none, an estimate; ``rows``: data has counts or ids."""
    bytes_per_token: int | None = None
    """Bytes that are taken as one token; None: a tokenizer counted them."""
    model: str | None = None
    """The model that was named; None: none was."""
    documents: int
    tokens: int
    longest_tokens: int
    lengths: tuple[KeptLength, ...]
    """Each is twice the one before; the last keeps everything."""
    whole_tokens: int = 0
    """The shortest length, of multiples of 256, that holds ``whole_share`` of them whole."""
    whole_share: float = 0.99
    """Share of the documents, 0 to 1."""
    cut: KeptLength | None = None
    """The named length, or that of a named ``whole_share``; else the longest that trains, if some
    documents are longer and thus cut."""
    is_asked: bool = False
    """True if ``cut`` is of a length that was named."""
    reach_tokens: int | None = None
    """The longest length that trains on the GPUs; None: none are named; 0: no length does."""
    native_length_tokens: int = 0
    """The model's native length; 0: no model is named."""
    trained_by: str | None = None
    """The trainer, the model and the GPUs, in words; None: no GPUs are named."""
    notes: tuple[str, ...]

    @property
    def enough(self) -> KeptLength:
        """Shortest length with 95 % of the tokens, if it trains; else the longest that trains."""
        found = next(each for each in self.lengths if each.kept_tokens >= 0.95 * self.tokens)
        trained = [each for each in self.lengths if each.trained]
        return trained[-1] if trained and found not in trained else found


def data_lengths(
    data: str | Sequence[str],
    model: str | None = None,
    *,
    length: int | str | None = None,
    price: str | float | None = None,
    whole: str | float | None = None,
    on_phase: OnPhase = unheard,
    **asked: Any,
) -> DataLengths:
    """Measure the documents in files, in tokens of the tokenizer of ``model`` (a folder with only
    that will do); estimated without one. Token ids, and counts of tokens, a number or a record a
    line, need none. With ``gpus`` and other keywords of ``predict``: also how each length is
    trained, and the time of one pass. ``length``: one more length to report. ``price``: of one GPU
    for an hour, ``2.5`` or ``"2.50/h"``, default: the catalog's. ``whole``: share of the documents
    that ``whole_tokens`` holds whole, ``"98%"``, default: 99 %. Raises HighwaterError for
    unreadable data, and for invalid settings.
    """
    hour_price, whole_share = parse_price(price), parse_share(whole or 0.99)
    paths = (data,) if isinstance(data, str) else tuple(data)
    read_from = whole_paths(paths)
    folder, vocab_size, native = None, 1 << 31, 0  # no id is larger
    may_cost = model is not None and (asked.get("gpus") or asked.get("gpu_memory"))
    if model is not None:
        own = Path(model).absolute()
        if own.is_dir() and not missing_files(own).tokenizer:
            folder = str(own)
        if folder is None or may_cost or (own / CONFIG).is_file():
            read = load_model(model)
            vocab_size, native = read.shape.vocab_size, read.shape.native_length_tokens
            is_missing = missing_files(Path(read.directory)).tokenizer
            folder = folder or (None if is_missing else read.directory)
    order = CorpusOrder(
        data=read_from,
        objective=asked.get("objective", Settings().objective),
        length_tokens=MOST_TOKENS,
        tokenizer=folder,
        vocab_size=vocab_size,
        lengths_alone=True,
    )
    counts = _counts_in(read_from) if TRAITS[order.objective].is_of_plain_documents else []
    documents, tokenizer, notes = sorted(counts), "rows", ()
    if not documents:
        corpus = tokenised(order, on_phase=on_phase)
        offsets = array("q", Path(corpus.directory, "offsets.bin").read_bytes())
        documents = sorted(after - before for before, after in pairwise(offsets))
        tokenizer, notes = corpus.tokenizer, corpus.notes
    is_estimated = tokenizer == "bytes"
    if is_estimated:
        documents = [-(-each // _BYTES_PER_TOKEN) for each in documents]
    lengths, least_tokens = [_USUAL // 8], min(documents[len(documents) // 10], _USUAL)
    while lengths[-1] < documents[-1]:
        lengths.append(2 * lengths[-1])
    lengths = [each for each in lengths if each >= least_tokens]
    keep = partial(_kept, documents, model if may_cost else None, hour_price, asked)
    kept = tuple(map(keep, lengths))
    at = documents[math.ceil(round(whole_share * len(documents), 6)) - 1]
    whole_tokens, reach, trained_by = -(-at // _ROUND) * _ROUND, None, None
    cut = None if whole is None else whole_tokens
    cut = cut if length is None else parse_tokens(str(length))
    if model is not None and may_cost:
        longest = predict(model, **asked)
        row, reach = REGISTRY[longest.trainer], longest.explained.capacity_tokens
        for_whom = row.trained or f"{row.title}'s trainer"
        by = "" if longest.trainer == OURS else f" for {for_whom}"
        on_host = " with host memory" * longest.explained.cell.settings.uses_host
        where = f"{longest.gpus} x {longest.device_name}{on_host} train"
        where += "s" * (longest.gpus == 1)
        trained_by = f"{where} {longest.model_name}{by}"
        cut = reach if cut is None and 0 < reach < documents[-1] else cut
        notes += untimed(longest.trainer)
    is_listed = hour_price is None and any(each.epoch_price for each in kept)
    return DataLengths(
        data=paths,
        tokenizer=tokenizer,
        bytes_per_token=_BYTES_PER_TOKEN if is_estimated else None,
        model=model,
        documents=len(documents),
        tokens=sum(documents),
        longest_tokens=documents[-1],
        lengths=kept,
        whole_tokens=whole_tokens,
        whole_share=whole_share,
        reach_tokens=reach,
        native_length_tokens=native,
        cut=keep(cut) if cut else None,
        is_asked=length is not None,
        trained_by=trained_by,
        notes=(*notes, LIST_PRICE_NOTE) if is_listed else notes,
    )


def _counts_in(paths: Sequence[str]) -> list[int]:
    """Tokens of each document, of files whose lines say how many; empty unless the first two do, as
    a text may begin with a number. Raises UsageError for a later line that does not.
    """
    found: list[int] = []
    if not all(Path(each).is_file() and os.access(each, os.R_OK) for each in paths):
        return found
    with fileinput.input(paths, encoding="utf-8-sig", errors="replace") as lines:
        for line in filter(str.strip, lines):
            if (tokens := _count_of(line)) is None:
                if len(found) < 2:
                    return []
                where = f"{lines.filename()}:{lines.filelineno()}"
                raise UsageError(f"{where} lacks a count of tokens", hint="write one: `14060`")
            found.append(tokens)
    return found if len(found) > 1 else []


def _count_of(line: str) -> int | None:
    """Tokens by a line: a number, or a record with one count and no text; None: it is neither."""
    row: Any = None
    with suppress(msgspec.DecodeError):
        row = from_json(line, object)
    told: dict[str, Any] = row if isinstance(row, dict) else {"tokens": row}
    counts = [told[name] for name in told if _COUNT.fullmatch(name)]
    is_text = len(counts) != 1 or type(counts[0]) is not int or any(map(_TEXT.fullmatch, told))
    return counts[0] if not is_text and 0 < counts[0] <= MOST_TOKENS else None


def _kept(
    documents: Sequence[int],
    model: str | None,
    price: float | None,
    asked: dict[str, Any],
    length_tokens: int,
) -> KeptLength:
    kept = sum(min(each, length_tokens) for each in documents)
    trained, epoch_s, epoch_price = None, None, None
    if model is not None:
        prediction = predict(model, length=length_tokens, **asked)
        trained = prediction.answer
        is_alone = prediction.memory_limit.rollout is None  # how long one generates is unknown
        if trained is not None and trained.step is not None and is_alone:
            hour = hour_dollars_of(prediction.device_name, price)
            cost = cost_of(kept, trained.step, gpus=prediction.gpus, hour_dollars=hour)
            epoch_s, epoch_price = cost.time_s, cost.dollars
    return KeptLength(
        length_tokens=length_tokens,
        documents=sum(each <= length_tokens for each in documents),
        kept_tokens=kept,
        trained=trained,
        epoch_s=epoch_s,
        epoch_price=epoch_price,
    )
