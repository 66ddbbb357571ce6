"""Small corpora for tests, and a real tokenizer: byte-level BPE, trained here, with a template."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from highwater.engine.data.store import OpenCorpus, open_corpus
from highwater.engine.data.tokenise import tokenise
from highwater.nouns.corpus import CorpusOrder

END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BEGIN = "<|begin|>"
WORDS = (
    "the cat sat on the mat and the dog ran after the cat over the hill to the town where "
    "people answer questions about numbers, colours and the weather; user assistant system "
    "Hello there! What is one and one? It is two. Why? Because. Thanks. "
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes an empty thought before the last answer alone, as Qwen3's does."""
COUNTING = (
    "{{ messages | length }} messages\n"
    "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
)
"""Begins otherwise with each message: no beginning of it is one of the whole."""


def write_tokenizer(
    folder: Path, template: str | None = CHATML, *, begins: bool = False, words: bool = False
) -> Path:
    """A directory with a tokenizer. ``begins``: it puts a token before each text and one after.
    ``words``: a space before each text is a part of its first token, as with SentencePiece.
    """
    specials = [END, START_TURN, END_TURN, BEGIN]
    model = Tokenizer(models.BPE(unk_token=None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if words:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        model.decoder = decoders.Metaspace(prepend_scheme="always")
        alphabet = sorted({*WORDS, "▁", "\n", ":", *"0123456789"})
    else:
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([WORDS] * 4, trainer)
    if begins:
        model.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A {END}",
            special_tokens=[(BEGIN, specials.index(BEGIN)), (END, specials.index(END))],
        )
    model.enable_truncation(8)  # what nobody may be cut by
    model.enable_padding(length=16, pad_id=0, pad_token=END)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END, model_max_length=8)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def order(data: Path | Iterable[Path], **choices: Any) -> CorpusOrder:
    paths = [data] if isinstance(data, Path) else list(data)
    given = {"objective": "sft", "length_tokens": 512, "vocab_size": 512, **choices}
    given["tokenizer"] = str(given["tokenizer"]) if given.get("tokenizer") else None
    return CorpusOrder(data=tuple(map(str, paths)), **given)


def made(folder: Path, data: Path | Iterable[Path], **choices: Any) -> OpenCorpus:
    scratch = folder / f"scratch-{len(list(folder.glob('scratch-*')))}"
    scratch.mkdir(parents=True)
    (folder / "corpora").mkdir(exist_ok=True)
    summary = tokenise(
        order(data, **choices), folder / "corpora", scratch=scratch, on_phase=lambda _: None
    )
    return open_corpus(summary.directory)


def of_records(folder: Path, records: Iterable[Mapping[str, Any]], **choices: Any) -> OpenCorpus:
    return made(folder, write_lines(folder / "d.jsonl", records), **choices)


def ids_of(corpus: OpenCorpus) -> list[list[int]]:
    return [corpus.document(number).ids_L.tolist() for number in range(corpus.summary.documents)]


def trained_of(corpus: OpenCorpus) -> list[list[int]]:
    labels = [corpus.document(number).labels_L for number in range(corpus.summary.documents)]
    return [labels_L[labels_L != -100].tolist() for labels_L in labels]
