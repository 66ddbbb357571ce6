"""The process that prepares what another trainer is given: ``python -m
highwater.engine.training.trainer_inputs FOLDER``, where the order lies and the answer is left.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from highwater.engine.data.exact_documents import exact_texts
from highwater.engine.models.openable_directory import openable_directory
from highwater.errors import HighwaterError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.preparation import (
    ORDER_FILE,
    PREPARED_FILE,
    DocumentOrder,
    PreparationOrder,
    Prepared,
    Refused,
)


def main() -> None:
    """Prepare what the order in the folder says, or leave word why it cannot be."""
    folder = Path(sys.argv[1])
    order = from_json((folder / ORDER_FILE).read_bytes(), PreparationOrder)
    try:
        prepared = prepare(order)
    except HighwaterError as error:
        prepared = Prepared(refused=Refused(problem=error.problem, hint=error.hint))
    (folder / PREPARED_FILE).write_text(to_json(prepared), encoding="utf-8")


def prepare(order: PreparationOrder) -> Prepared:
    """Make a directory where the model's own cannot be opened, and write the documents.

    Raises HighwaterError for what cannot be prepared.
    """
    directory = openable_directory(
        Path(order.model_directory),
        Path(order.cache_directory),
        Path(order.scratch_directory),
        seed=order.seed,
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
    main()
