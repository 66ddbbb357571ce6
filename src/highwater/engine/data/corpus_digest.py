"""The digest that names a corpus: of all that its tokens may depend on, and of nothing else, so
that the same data in another folder is the same corpus.
"""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from highwater.engine.data.data_files import DataFile, bytes_digest
from highwater.nouns.codec import digest
from highwater.nouns.corpus import CorpusOrder
from highwater.nouns.files import CONFIG_BYTES, read_file

_WRITTEN_AS = 2
"""Counted up where the same order makes other files."""
_OF_A_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("additional_chat_templates/*", "vocab*", "merges.txt", "*.model", "tekken.json"),
)
"""Names of the files that a tokenizer is made of."""


def corpus_digest(order: CorpusOrder, files: Sequence[DataFile], reward: Any | None) -> str:
    """16 digits that name what an order makes of these files; ``reward`` is the function that the
    order names.
    """
    data = [(file.name, bytes_digest(file.parts)) for file in files]
    choices = (
        *(order.objective, order.length_tokens, order.vocab_size),
        *(order.long_documents, order.trained, order.reward),
    )
    return digest(
        (_WRITTEN_AS, choices, data, _tokenizer_digest(order.tokenizer), _source_digest(reward))
    )


def _tokenizer_digest(directory: str | None) -> object:
    if directory is None:
        return None
    folder = Path(directory)
    found = {path for pattern in _OF_A_TOKENIZER for path in folder.glob(pattern)}
    files = [
        (str(path.relative_to(folder)), bytes_digest([path])) for path in found if path.is_file()
    ]
    return sorted(files), _model_type(folder / "config.json")


def _model_type(config: Path) -> str | None:
    """The family, by which transformers chooses a tokenizer's class where its own files do not
    say; the rest of a config is nothing to it.
    """
    try:
        return str(json.loads(read_file(config, most_bytes=CONFIG_BYTES)).get("model_type"))
    except (OSError, ValueError, AttributeError):
        return None


def _source_digest(function: Any | None) -> str | None:
    """Digest of the file that a function of the user's is in; None where it is in none."""
    try:
        source = None if function is None else inspect.getsourcefile(function)
    except TypeError:
        return None
    return None if source is None else bytes_digest([Path(source)])
