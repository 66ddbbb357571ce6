"""One process of a group: Trainers of several layouts, one after another, by the public class."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from highwater.engine import Quantity, Trainer
from highwater.errors import HighwaterError

STEPS, MICRO_BATCHES = 3, 2
LENGTHS = (30, 17, 16)
"""Odd ones: no rank's share is as long as another's."""
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}},
    2: {
        "ring": {"ring": 2},
        "ulysses": {"ulysses": 2},
        "data parallel": {},
        "ring, offloaded": {"ring": 2, "offload": True, "recompute": "none"},
    },
}
COMMON = {
    "length": 32,
    "sequences_per_micro_batch": 2,
    "loss": "chunked",
    "learning_rate": 0.01,
    "device": "cpu",
    "logit_range": True,
}
OWN = {
    "root": Quantity(how="sum"),
    "root_of_a_token": Quantity(how="mean", per="n_valid_tokens"),
    "smallest_root": Quantity(how="min"),
    "largest_root": Quantity(how="max"),
    "length": Quantity(how="mean", per="n_documents", group="data"),
    "long": Quantity(how="sum", group="data", is_count=True),
    "root_of_a_long_one": Quantity(how="mean", per="long"),
}
"""The loop's own quantities: of the labels that a rank holds, and of documents, of which ranks that
share them have all."""


def micro_batch(number: int) -> list[Any]:
    """Documents that follow from a micro-batch's number in the whole run, prompts untrained."""
    generator = torch.Generator().manual_seed(number)
    documents = []
    for length in LENGTHS:
        ids = torch.randint(2, 64, (length,), generator=generator).tolist()
        documents.append({"input_ids": ids, "labels": [-100] * 5 + ids[5:]})
    return documents


def trained(model: str, settings: dict[str, Any], saved: Path) -> dict[str, Any]:
    with Trainer(model, **COMMON, **settings, quantities=OWN) as trainer:
        degree = trainer.data_parallel_degree
        own = MICRO_BATCHES // degree

        def of_step(step: int) -> list[Any]:
            first = step * MICRO_BATCHES + trainer.data_rank
            return [micro_batch(first + turn * degree) for turn in range(own)]

        told = {"degree": degree, "data_rank": trainer.data_rank, "steps": [], "told": []}
        for step in range(STEPS):
            trainer.learning_rate = 0.01 / (step + 1)
            told["steps"].append(trainer.step(of_step(step)))
            add_own(trainer, of_step(step))
            told["told"].append(trainer.statistics())
        told["evaluation"] = trainer.evaluate(of_step(STEPS))
        if trainer.spec.layout.gpus > 1:
            told["refused"] = refused(trainer, own)
        told["after"] = trainer.evaluate(of_step(STEPS))
        trainer.save(saved)
        told["saved twice"] = error_of(lambda: trainer.save(saved))
    return told


def add_own(trainer: Trainer, own: list[Any]) -> None:
    for batch in trainer.batches(own):
        for label in batch.labels_N.tolist():
            for name in ("root", "root_of_a_token", "smallest_root", "largest_root"):
                trainer.add(name, label**0.5)
            trainer.add("root_of_a_long_one", label**0.5)
    for document in (document for documents in own for document in documents):
        trainer.add("length", len(document["input_ids"]))
        trainer.add("long", len(document["input_ids"]) > 16)


def refused(trainer: Trainer, own: int) -> dict[str, str | None]:
    """What each rank is told where only the last one was given something else."""
    last = trainer.rank == int(os.environ["WORLD_SIZE"]) - 1
    good = [micro_batch(trainer.data_rank)] * own
    return {
        "a token outside": error_of(lambda: trainer.step([[[99]]] if last else good)),
        "another number": error_of(lambda: trainer.step(good * 2 if last else good)),
        "other documents": error_of(lambda: trainer.evaluate([micro_batch(50 + last)] * own)),
    }


def error_of(call: Any) -> str | None:
    try:
        call()
    except HighwaterError as error:
        return str(error)
    return None


def main() -> None:
    model, results = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    cases = CASES[int(os.environ["WORLD_SIZE"])]
    told = {name: trained(model, case, results / name) for name, case in cases.items()}
    (results / f"{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
