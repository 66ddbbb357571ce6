"""The process that prepares what another trainer is given: ``python -m
highwater.engine.training.trainer_inputs ORDER.json REPORT.json``. The report lies below the cache,
on whose disk a directory is made.
"""

import json
from pathlib import Path

from transformers import AutoTokenizer

from highwater.engine.data.exact_documents import exact_texts
from highwater.engine.models.openable_directory import openable_directory
from highwater.nouns.job import serve
from highwater.nouns.preparation import DocumentOrder, PreparationOrder, Prepared


def prepare(order: PreparationOrder, scratch: Path) -> Prepared:
    """Make a directory where the model's own cannot be opened, in ``scratch`` first, and write the
    documents.

    Raises HighwaterError for what cannot be prepared.
    """
    directory = openable_directory(
        Path(order.model_directory), Path(order.cache_directory), scratch, seed=order.seed
    )
    if order.documents is not None:
        _write_documents(order.documents, directory, order.seed)
    return Prepared(model_directory=str(directory))


def _write_documents(wanted: DocumentOrder, directory: Path, seed: int) -> None:
    """Write documents that are exactly as long as they should be to the directory's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    texts = exact_texts(
        tokenizer,
        length_tokens=wanted.length_tokens,
        count=wanted.count,
        seed=seed,
        end=(wanted.end or str(tokenizer.eos_token)) if wanted.kind == "text" else "",
    )
    lines = "".join(json.dumps({wanted.kind: text}) + "\n" for text in texts)
    Path(wanted.path).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    serve(PreparationOrder, prepare)
