"""What every trainer is tried on, made by a Python that has transformers: a model of two layers
with random weights, a tokenizer of a thousand words, and conversations longer than any trial.

    python tiny_model.py CONFIG_DIRECTORY FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LONGEST = 32768
"""Words, and so tokens, of each answer."""
ROWS = 16
WORDS = [f"w{number}" for number in range(1000)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "user", "assistant", "system"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
"""Spaces stand between all words: the tokenizer knows no others."""


def main(shape: Path, folder: Path) -> None:
    """Write the model, the rows, and what LLaMA-Factory wants to be told of them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape))
    model.save_pretrained(folder / "tiny")
    tokenizer().save_pretrained(folder / "tiny")
    answer = " ".join(WORDS[7 * number % len(WORDS)] for number in range(LONGEST))
    said = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": answer}]
    row = json.dumps({"messages": said}) + "\n"
    (folder / "rows.jsonl").write_text(row * ROWS)
    Dataset.from_list([{"messages": said}] * ROWS).to_parquet(folder / "rows.parquet")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": described()}))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, ends of turns as Qwen's."""
    names = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    pad, begin, end, unknown = SPECIAL[:4]
    words = Tokenizer(WordLevel(names, unk_token=unknown))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=unknown,
        pad_token=pad,
        eos_token=end,
        additional_special_tokens=[begin],
    )
    made.chat_template = TEMPLATE
    return made


def described() -> dict[str, object]:
    """The rows as LLaMA-Factory wants to be told of them."""
    tags = {"role_tag": "role", "content_tag": "content"}
    roles = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
    return {
        "file_name": "rows.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags | roles,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
