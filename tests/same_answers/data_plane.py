"""What is asked of the data plane in Python, by one process, which imports torch once: tokens of
every kind of record, the Trainer in a loop of one's own, public names.
"""

import gzip
import importlib
import json
import re
import shutil
import sys
import warnings
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain
from typed import signature, told

sys.path.insert(0, str(Path(__file__).parents[1] / "numeric"))

DATA = Path("tests/data")
CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
ROLLOUT = {"prompt": "Why?", "responses": [" Two.", " No."], "rewards": [1.0, 0.0]}
OTHERS: dict[str, tuple[str, list[Any]]] = {
    "text.txt": ("sft", ["A text.\nAnother line."]),
    "text.md": ("sft", ["# A text\n\nof two paragraphs"]),
    "packed.jsonl.gz": ("sft", [CHAT]),
    "chat.parquet": ("sft", [CHAT]),
    "grpo.jsonl": ("grpo", [ROLLOUT]),
    "ids.jsonl": ("grpo", [{"prompt": "Why?", "response_ids": [[21, 22], [23]], "rewards": [1, 0],
                            "logprobs": [[-0.5, -1.5], [-0.25]]}]),
    "ppo.jsonl": ("ppo", [{"prompt": "Why?", "response": " Two.", "reward": 1.0}]),
}  # fmt: skip
"""Formats that no record of tests/data has."""


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
    """The folder with the tokens of some data."""
    order = private("CorpusOrder")(
        data=(str(data),),
        tokenizer=None if tokenizer is None else str(tokenizer),
        objective=objective,
        **{"length_tokens": 4096, "vocab_size": 512, **how},
    )
    made = place / "corpora"
    shutil.rmtree(made, ignore_errors=True)
    (made / "scratch").mkdir(parents=True)
    told = private("tokenise")(order, made, scratch=made / "scratch", on_phase=lambda _: None)
    return Path(told.directory)


# ------------------------------------------------------------------------------------------------


def tokens(*asked: Any, **how: Any) -> dict[str, Any]:
    """Ids, and which of them are trained; of everything in the folder what it holds."""
    place = asked[1]
    directory = corpus(*asked, **how)
    found: dict[str, Any] = {}
    for name, kind in (("ids", "H"), ("trained", "B")):
        numbers = array(kind, (directory / f"{name}.bin").read_bytes())
        found[name] = plain.short(" ".join(map(str, numbers)))
    held = plain.files(directory, place)
    # Its digest is of the tokenizer's file, which another version of a library writes otherwise.
    held = {name: each for name, each in held.items() if name != "manifest.json"}
    return found | {"files": {re.sub(r"\b[0-9a-f]{16}\b", "D", k): v for k, v in held.items()}}


def formats(place: Path) -> Iterator[tuple[str, Any]]:
    """Yield a question for each record, each file of people's own data, and each other format."""
    from corpora import write_tokenizer

    templates = json.loads((DATA / "records/templates.json").read_text("utf-8"))
    made = {None: None} | {
        name: write_tokenizer(place / name, template)
        for name, template in {**templates, "none": None}.items()
    }
    for line in (DATA / "records/records.jsonl").read_text("utf-8").splitlines():
        case = json.loads(line)
        data = place / ("data.json" if isinstance(case["record"], list) else "data.jsonl")
        data.write_text(json.dumps(case["record"], ensure_ascii=False) + "\n", "utf-8")
        tokenizer = made[case["template"] or "none"]
        for objective in ("dpo", "rw") if case["objective"] == "dpo" else ("sft",):
            yield (
                f"tokens: {case['id']} {objective}",
                told(lambda d=data, t=tokenizer, o=objective: tokens(d, place, t, o)),
            )
    for path in sorted((DATA / "own_data").iterdir()):
        objective = "dpo" if "dpo" in path.name else "sft"
        for name in ("chatml", "plain", "none", None):
            for how in ({}, {"trained": "all"}, {"length_tokens": 32, "long_documents": "split"}):
                yield (
                    f"tokens: {path.name} {name} {how}",
                    told(
                        lambda p=path, n=name, o=objective, h=how: tokens(
                            p.absolute(), place, made[n], o, **h
                        )
                    ),
                )
    for name, (objective, rows) in OTHERS.items():
        data = written(place / name, rows)
        for template in ("chatml", None):
            yield (
                f"tokens: {name} {template}",
                told(lambda d=data, t=template, o=objective: tokens(d, place, made[t], o)),
            )


def written(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    path.write_bytes(
        gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    )
    return path


def loops(place: Path, model: str) -> Iterator[tuple[str, Any]]:
    """Yield two steps of a Trainer, with what it saves and what it says of a refusal."""
    kinds: dict[str, dict[str, Any]] = {
        "as it is": {},
        "fsdp, full loss, recomputed": {"strategy": "fsdp", "loss": "full", "recompute": "none"},
        "block sparse": {"attention": "block_sparse", "block_size": 16},
        "lora": {"lora": 4},
        "no such setting": {"no_such": 1},
    }
    for name, settings in kinds.items():
        yield f"python: Trainer {name}", told(lambda n=name, s=settings: loop(place / n, model, s))


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

    yield "python: highwater.engine.__all__", list(highwater.engine.__all__)
    for package, name in (
        *((highwater, name) for name in highwater.__all__ if not name.startswith("_")),
        *((highwater.engine, name) for name in highwater.engine.__all__),
    ):
        question = f"python: {package.__name__}.{name}"
        yield question, told(lambda p=package, n=name: signature(getattr(p, n)))


def main() -> None:
    out, place, model = sys.argv[1:]
    warnings.simplefilter("ignore")
    found = dict([*names(), *formats(Path(place)), *loops(Path(place), model)])
    text = plain.text(json.dumps(found, ensure_ascii=False), Path(place))
    Path(out).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
