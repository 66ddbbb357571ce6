"""What is asked of the data plane in Python, by one process, which imports torch once."""

import gzip
import importlib
import json
import re
import shutil
import sys
import warnings
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import plain
from typed import signature, told

DATA = Path("tests/data")
END = "<|endoftext|>"
WORDS = (
    "the cat sat on the mat and the dog ran after the cat; user assistant system tool "
    "Hello there! What is one and one? It is two. Why? Because. Thanks. "
)
CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
SAMPLED = {"prompt": "Why?", "response_ids": [[21, 22], [23]], "logprobs": [[-0.5, -1.5], [-0.25]]}
OTHERS: dict[str, tuple[str, Any]] = {
    "text.txt": ("sft", "A text.\nAnother line."),
    "text.md": ("sft", "# A text\n\nof two paragraphs"),
    "packed.jsonl.gz": ("sft", CHAT),
    "chat.parquet": ("sft", CHAT),
    "grpo.jsonl": ("grpo", {"prompt": "Why?", "responses": [" Two.", " No."], "rewards": [1, 0]}),
    "ids.jsonl": ("grpo", {**SAMPLED, "rewards": [1, 0]}),
    "ppo.jsonl": ("ppo", {"prompt": "Why?", "response": " Two.", "reward": 1.0}),
}
"""Formats that no record of tests/data has."""
TRAINERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fsdp, full loss, nothing recomputed": {
        "strategy": "fsdp",
        "loss": "full",
        "recompute": "none",
    },
    "block sparse": {"attention": "block_sparse", "block_size": 16},
    "lora": {"lora": 4},
    "no such setting": {"no_such": 1},
}

Asked = tuple[str, Path, str | None, str, dict[str, Any]]


# --- The one place that imports what is private: where it lies is found by its name. ------------
def private(name: str) -> Any:
    """What a module of the package defines at its top under a name, wherever that module is."""
    import highwater

    package = Path(highwater.__file__).parent
    defines = re.compile(rf"^(def|class) {name}\b", re.MULTILINE)
    (path,) = (p for p in package.rglob("*.py") if defines.search(p.read_text("utf-8")))
    module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
    return getattr(importlib.import_module(module), name)


def corpus(data: Path, place: Path, tokenizer: Path | None, objective: str, **how: Any) -> Path:
    order = private("CorpusOrder")(
        data=(str(data.absolute()),),
        tokenizer=None if tokenizer is None else str(tokenizer),
        objective=objective,
        **{"length_tokens": 4096, "vocab_size": 512, **how},
    )
    shutil.rmtree(place / "corpora", ignore_errors=True)
    scratch = place / "corpora" / "scratch"
    scratch.mkdir(parents=True)
    made = private("tokenise")(order, scratch.parent, scratch=scratch, on_phase=lambda _: None)
    return Path(made.directory)


# ------------------------------------------------------------------------------------------------


def tokens(directory: Path, place: Path) -> dict[str, Any]:
    numbers = {
        name: array(kind, (directory / f"{name}.bin").read_bytes())
        for name, kind in (("ids", "H"), ("trained", "B"))
    }
    found = {name: plain.short(" ".join(map(str, each))) for name, each in numbers.items()}
    return {**found, "files": plain.files(directory, place)}


def formats(place: Path) -> Iterator[Asked]:
    """Yield a name, its data, a template and an objective for each record and format."""
    for line in (DATA / "records/records.jsonl").read_text("utf-8").splitlines():
        case = json.loads(line)
        data = place / f"{case['id']}.json{'' if isinstance(case['record'], list) else 'l'}"
        data.write_text(json.dumps(case["record"], ensure_ascii=False) + "\n", "utf-8")
        for objective in ("dpo", "rw") if case["objective"] == "dpo" else ("sft",):
            yield case["id"], data, case["template"] or "none", objective, {}
    for path in sorted((DATA / "own_data").iterdir()):
        for template in ("chatml", "plain", "none", None):
            for how in ({}, {"trained": "all"}, {"length_tokens": 32, "long_documents": "split"}):
                yield path.name, path, template, "dpo" if "dpo" in path.name else "sft", how
    for name, (objective, row) in OTHERS.items():
        data = place / name
        said = (row if isinstance(row, str) else json.dumps(row) + "\n").encode()
        if data.suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist([row]), data)
        else:
            data.write_bytes(gzip.compress(said, mtime=0) if data.suffix == ".gz" else said)
        for template in ("chatml", None):
            yield name, data, template, objective, {}


def tokenised(place: Path) -> Iterator[tuple[str, Any]]:
    templates = json.loads((DATA / "records/templates.json").read_text("utf-8")) | {"none": None}
    made: dict[str | None, Path | None] = {None: None}
    made |= {name: tokenizer(place / name, template) for name, template in templates.items()}
    for name, data, template, objective, how in formats(place):

        def ask(named: Asked = (name, data, template, objective, how)) -> dict[str, Any]:
            _, data, template, objective, how = named
            return tokens(corpus(data, place, made[template], objective, **how), place)

        yield f"tokens: {name}, {template}, {objective}, {how}", told(ask)


def tokenizer(folder: Path, template: str | None) -> Path:
    """A directory with a byte-level BPE of a few merges, and a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator([WORDS] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END)
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def loop(place: Path, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    from highwater.engine import Trainer

    rows = [[[(3 * at + row) % 512 for at in range(100)]] for row in range(2)]
    with Trainer(model, length=128, device="cpu", learning_rate=1e-3, **settings) as trainer:
        losses = [trainer.step(rows).loss for _ in range(2)]
        evaluated = trainer.evaluate(rows).loss
        trainer.save(place)
    return {"losses": losses, "evaluated": evaluated, "files": plain.files(place, place)}


def names() -> Iterator[tuple[str, Any]]:
    import highwater
    import highwater.engine

    for package in (highwater, highwater.engine):
        yield f"python: {package.__name__}.__all__", list(package.__all__)
        for name in package.__all__:
            if not name.startswith("_"):
                yield (
                    f"python: {package.__name__}.{name}",
                    told(lambda p=package, n=name: signature(getattr(p, n))),
                )


def main() -> None:
    out, folder, model = sys.argv[1:]
    place = Path(folder)
    plain.PLACES[Path(model).parent] = "RUNS"
    warnings.simplefilter("ignore")
    loops = (
        (f"python: Trainer {name}", told(partial(loop, place / name, model, settings)))
        for name, settings in TRAINERS.items()
    )
    found = dict([*names(), *tokenised(place), *loops])
    Path(out).write_text(plain.text(json.dumps(found, ensure_ascii=False), place), "utf-8")


if __name__ == "__main__":
    main()
