"""The process that prepares what another trainer is given: ``python -m
highwater.train.trainer_inputs FOLDER``, where the order lies and the answer is left.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from highwater.errors import HighwaterError
from highwater.models.openable_directory import openable_directory
from highwater.spec.codec import from_json, to_json
from highwater.spec.preparation import (
    ORDER_FILE,
    PREPARED_FILE,
    PreparationOrder,
    Prepared,
    Refused,
)
from highwater.train.exact_documents import exact_texts


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
    """Write the documents, and make a directory where the model's own cannot be opened.

    Raises HighwaterError for what cannot be prepared.
    """
    directory = openable_directory(
        Path(order.model_directory),
        Path(order.cache_directory),
        Path(order.scratch_directory),
        seed=order.seed,
    )
    tokenizer = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    texts = exact_texts(
        tokenizer,
        length_tokens=order.length_tokens,
        count=order.documents,
        seed=order.seed,
        end=(order.end or str(tokenizer.eos_token)) if order.kind == "text" else "",
    )
    lines = "".join(json.dumps({order.kind: text}) + "\n" for text in texts)
    Path(order.documents_path).write_text(lines, encoding="utf-8")
    return Prepared(model_directory=str(directory))


if __name__ == "__main__":
    main()
