"""What predictions say of popular models: the simplest settings for each of several lengths, with
what they take. The page that answers and the pages of models are made of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from highwater.memory.capacity import CellPrediction
from highwater.memory.predictor import predict_at
from highwater.memory.question import memory_limit_of
from highwater.memory.trainers import MEMORY, accuracy, calibration_of
from highwater.model.model import load_model
from highwater.nouns.cells import simplicity
from highwater.nouns.objective import ATTENTION
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.study import Cell, Question
from highwater.nouns.trainer import OURS
from highwater.recommendation.candidates import Goal, candidate_of, recommendation_of
from highwater.recommendation.recommend import goal_of
from highwater.speed import predicted_step
from highwater.trials.probe import gpus_meant

MODELS = (
    *("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-4B-Instruct-2507", "Qwen3-8B", "Qwen3-14B"),
    *("Qwen3-32B", "Qwen3-30B-A3B", "Qwen2.5-0.5B", "Qwen2.5-1.5B-Instruct"),
    *("Qwen2.5-7B-Instruct", "Qwen2.5-14B-Instruct", "Qwen2.5-32B-Instruct"),
    *("DeepSeek-R1-Distill-Qwen-7B", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B"),
    *("Llama-3.1-70B", "Mistral-7B-v0.3", "Mistral-Nemo-Base-2407", "Mixtral-8x7B-v0.1"),
    *("gemma-2-9b", "gemma-3-1b-pt", "gemma-3-4b-text", "gemma-3-27b-text", "phi-4"),
    *("SmolLM2-1.7B", "SmolLM3-3B", "gpt-oss-20b", "OLMo-2-1124-7B"),
)
"""Thirty of the catalog that many train."""
GPUS = ("RTX-4090", "L40S", "A100-80GB", "H100-80GB", "H200-141GB", "B200")
RANK = 16
"""Rank of the adapters of LoRA."""
_OF_OTHERS = "chunked"
"""The loss of most other trainers, whose configuration is that of the first settings with it."""


class Answered(NamedTuple):
    """The simplest settings for one length, and what is predicted of them."""

    found: Recommendation
    """Its candidates are the one that is chosen, and those beside it that were asked for."""
    predicted: CellPrediction | None
    """None: nothing fits."""


def trainings(model: str, gpus: int) -> Mapping[str, Mapping[str, Any]]:
    """Settings of each kind of training that a model is asked about on so many GPUs. Beside experts
    adapters are on attention alone, and nothing is in NF4.
    """
    lora: dict[str, Any] = {"lora": RANK}
    if load_model(model).shape.experts > 1:
        targets = {"lora_targets": ",".join(ATTENTION)}
        return {"all parameters": {}, f"LoRA of rank {RANK}, on attention": lora | targets}
    # a model in NF4 is not sharded: each GPU has a copy
    nf4 = lora | {"lora_base": "nf4"} | ({"copies": [gpus]} if gpus > 1 else {})
    return {"all parameters": {}, f"LoRA of rank {RANK}": lora, f"QLoRA of rank {RANK}": nf4}


def simplest_by_length(
    model: str,
    gpus: str,
    lengths: Iterable[int],
    settings: Mapping[str, Any],
    *,
    with_others: bool = False,
) -> Iterator[Answered]:
    """The simplest settings for each length, as ``predict --length`` answers, the shortest first,
    up to where no scaling of the positions reaches. What has no room for a length has none for a
    longer one, and is not asked again. ``with_others``: the candidates go on to the first with a
    chunked loss, of which other trainers' configurations are made.
    """
    where = gpus_meant(gpus, None)
    limit = memory_limit_of(where, host_memory=None, reserved=0)
    goal = goal_of(model, 0, where, limit, OURS, settings, 0)
    question, notes = goal.question(goal.sequences, length_tokens=None)
    known = calibration_of(question, OURS)

    def predicted(cell: Cell, length_tokens: int) -> CellPrediction:
        predictor = MEMORY[OURS].predictor(question, cell, limit)
        return predict_at(predictor, length_tokens, known and known.of(cell.settings.allocator))

    cells = sorted(question.cells, key=simplicity)
    for length_tokens in sorted(each for each in lengths if each <= question.grid.max_tokens):
        may_fit: list[CellPrediction] = []
        for cell in tuple(cells):
            told = predicted(cell, length_tokens)
            if told.risk is None:
                cells.remove(cell)
                continue
            may_fit.append(told)
            if told.capacity_tokens:
                break
        best = max(may_fit, key=lambda c: (c.capacity_tokens, c.headroom_bytes), default=None)
        chosen = [] if best is None else [best]
        if best is not None and best.capacity_tokens and with_others:
            for cell in cells[cells.index(best.cell) + 1 :]:
                if chosen[-1].cell.settings.loss == _OF_OTHERS:
                    break
                told = predicted(cell, length_tokens)
                chosen += [told] if told.capacity_tokens else []
        asked = replace(goal, length_tokens=length_tokens)
        candidates = tuple(_candidate(asked, question, each) for each in chosen)
        found = recommendation_of(
            *(asked, question, candidates),
            accuracy=accuracy(question, OURS, 0, known),
            unlike=known.unlike if known else (),
            notes=notes,
        )
        yield Answered(found, best)


def _candidate(goal: Goal, question: Question, predicted: CellPrediction) -> Candidate:
    """A candidate with the time of a step; what may fit is taken as a fit, and its risk says so."""
    step = predicted_step(
        *(question.model.shape, predicted.cell.settings, predicted.cell.layout),
        length_tokens=goal.length_tokens,
        device_name=question.device_name,
    )
    length = {"capacity_tokens": goal.length_tokens, "lacks_bytes": None}
    return candidate_of(goal, msgspec.structs.replace(predicted, step=step, **length))
