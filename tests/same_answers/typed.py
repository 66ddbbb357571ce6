"""Questions that are typed and answered without torch, in this process."""

import importlib
import inspect
import io
import itertools
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import plain

MODELS = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B", "Llama-3.1-8B", "Qwen3-32B")
CLUSTERS = ("1xH200-141GB", "4xA100-80GB", "8xH100-80GB", "2xRTX-4090", "16xH20-96GB")
TRAINERS = (
    *("trinity", "verl", "areal", "trl", "torchtitan", "accelerate"),
    *("axolotl", "llamafactory", "ms-swift"),
)
STUDIES = sorted(map(str, Path("docs/results").rglob("*.jsonl")))
TABLES = sorted(str(path) for path in Path("tests/data").glob("published_capacity_*.csv"))
SNAPSHOTS = (
    *sorted(map(str, Path("tests/data").rglob("*.pickle"))),
    *sorted(map(str, Path("docs/results").rglob("*.pickle"))),
)
VERBS = (
    *("predict", "recommend", "find", "try", "train", "guide", "emit", "show", "report"),
    *("profile", "models", "gpus", "doctor", "completion", "bench", "schema"),
)
VARIANTS = (
    (),
    ("--length", "65536"),
    ("--objective", "ppo", "--critic"),
    ("--objective", "rw", "--sequences-per-micro-batch", "2"),
    ("--recompute", "all-but-attention", "--offload"),
    ("--objective", "grpo", "--loss", "full", "--entropy", "full"),
)
EMITTED = (
    ("Qwen3-8B", "8xH100-80GB", "32k"),
    ("Qwen3-4B", "4xA100-80GB", "100k", "--lora", "16"),
    ("Qwen3-30B-A3B", "2x8xH100-80GB", "16k"),
    ("Qwen3-8B", "8xH100-80GB", "16k", "--objective", "grpo"),
    ("Llama-3.1-8B", "2xH200-141GB", "64k", "--offload", "--objective", "dpo"),
)
PUBLISHED = "search_context_length_capacity"
PUBLISHED_DRY = ("--model_path", "Qwen3-8B", "--test_gpu_num", "2", "4", "--memory", "79.15GiB")
DRY = ("--dry-run", "--memory", "70GiB", "--device", "cuda", "--gpus", "1", "2")

Words = tuple[str, ...]


def questions() -> Iterator[Words]:
    """Yield what is typed, the program first; FOLDER is a new one, whose files are answer too."""
    yield from (("highwater", *words) for words in predictions())
    yield from (("highwater", *words) for words in tables())
    yield from (("highwater", *words) for words in records())
    yield from (("highwater", *words) for words in others())
    yield from ((PUBLISHED, *words) for words in published())
    # Commands that hints are tested with, most refused; none of those that train or write.
    for row in json.loads(Path("tests/data/hints.json").read_text("utf-8")):
        words = tuple(row["command"].split())
        asks = words[0] in ("predict", "recommend", "emit", "guide", "models", "gpus")
        if asks and not {"-o", "--output", "--timeline"} & {*words}:
            yield ("highwater", *words)


def predictions() -> Iterator[Words]:
    for number, (model, gpus) in enumerate(itertools.product(MODELS, CLUSTERS)):
        yield ("predict", model, "--gpus", gpus, "--json")
        yield ("recommend", model, "--gpus", gpus, "--length", "100k", "--json")
        variant = VARIANTS[number % len(VARIANTS)]
        yield ("predict", model, "--gpus", gpus, *variant, "--json")
        trainer = TRAINERS[number % 6]
        rollout = ("--rollout-gpus", "1") if trainer == "areal" else ()
        yield ("emit", model, "--gpus", gpus, "--for", trainer, "--length", "16k", *rollout)
        memory = ("--memory", "70GiB", "--device", "cpu", "--ulysses", "1")
        if number % 3 == 0:
            yield ("find", model, "--dry-run", "--json", *memory, *variant)
    for model in ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B"):
        four, eight = ("--gpus", "4xA100-80GB"), ("--gpus", "8xH100-80GB")
        for trainer in ("trinity", "trl"):
            yield ("predict", model, *four, "--trainer", trainer, "--json")
        yield ("predict", model, *four, "--explain")
        yield ("recommend", model, *eight, "--length", "64k", "--explain")
        yield ("guide", "--predict", model, "--gpus", "1xH100-80GB", "8xH100-80GB", "--json")
        yield ("recommend", model, *eight, "--length", "1M", "--rope", "yarn", "--list", "--json")


def tables() -> Iterator[Words]:
    for table in TABLES:
        yield ("guide", table, "--json")
        yield ("guide", table)
        yield ("guide", table, "-o", "FOLDER/guide.html")
    yield ("guide", *STUDIES, "--json")
    yield ("guide", *STUDIES, *TABLES)
    yield ("guide", *STUDIES, "-o", "FOLDER/guide.html")
    yield ("guide", "--predict", "Qwen3-4B", "--gpus", "4xA100-80GB", "-o", "FOLDER/guide.md")


def records() -> Iterator[Words]:
    for study in STUDIES:
        for form in ("table", "published", "lines", "json"):
            yield ("show", study, "--as", form)
        yield ("report", study, "--json")
        for kind in ("html", "md", "csv"):
            yield ("report", study, "-o", f"FOLDER/report.{kind}")
    for snapshot in SNAPSHOTS:
        yield ("profile", snapshot, "--json")
        yield ("profile", snapshot)
        yield ("profile", snapshot, "--html", "FOLDER/profile.html")
    yield ("profile", *SNAPSHOTS[:2], "--json")


def others() -> Iterator[Words]:
    yield ("--help",)
    for verb in VERBS:
        yield (verb, "--help")
        yield (verb,) if verb in ("models", "gpus", "schema") else (verb, "--no-such-flag")
    for shell in ("bash", "zsh", "fish"):
        yield ("completion", shell)
    yield from (("models", "--json"), ("models", "qwen3", "--json"), ("gpus", "--json"))
    yield from (("gpus", "h100", "--json"), ("doctor", "--json"))
    for trainer, (model, gpus, length, *more) in itertools.product(TRAINERS, EMITTED):
        rollout = ("--rollout-gpus", "1") if trainer == "areal" else ()
        words = ("emit", model, "--gpus", gpus, "--for", trainer, "--length", length, *more)
        yield (*words, *rollout, "--json")
        yield (*words, *rollout, "-o", "FOLDER/emitted")
    for number, variant in enumerate(VARIANTS):
        words = (*DRY, *(() if "--length" in variant else variant))
        yield ("find", MODELS[number], *words, "--log-dir", "FOLDER", "--json")
        yield ("find", MODELS[number], *words, "--print-config")
        yield ("find", MODELS[number], *words, "--print-sbatch")
        yield ("try", MODELS[number], "--length", "16k", *words, "--log-dir", "FOLDER", "--json")


def published() -> Iterator[Words]:
    """Every flag of the published script, on GPUs that are not here."""
    yield ("--help",)
    config = ("--config", "FOLDER/dry.yaml", "--log_dir", "FOLDER/logs")
    for words in (
        ("--test_sp_num", "1", "2", "4"),
        ("--start_length", "8192", "--method", "linear"),
        ("--entropy_saving", "--trainer_strategy", "fsdp2", "--save_hf_checkpoint", "never"),
        ("--offload", "--trainer_strategy", "fsdp2", "--timeout", "600"),
        ("--checkpoint_path", "FOLDER/saved", "--save_hf_checkpoint", "always"),
        ("--start_length", "none"),
        ("--trainer_strategy", "ddp"),
        ("--data", "nowhere:sequences"),
    ):
        yield (*PUBLISHED_DRY, *words, *config)
    yield ("--model_path", "Qwen3-8B", "--log_dir", "FOLDER/logs")
    yield ("--start_length", "4096")


def answers(folder: Path, only: str) -> Iterator[tuple[str, Any]]:
    for number, words in enumerate(questions()):
        if only in (question := " ".join(words)):
            place = folder / f"typed-{number}"
            place.mkdir()
            (place / "dry.yaml").write_text("dry_run: true\n")
            typed = [word.replace("FOLDER", str(place)) for word in words]
            yield question, {**typed_answer(typed, place), "files": written(place)}
    for question, ask in in_python():
        if only in question:
            yield question, told(ask)


def typed_answer(words: list[str], place: Path) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", words):
        try:
            code: Any = run(words[0])
        except SystemExit as stop:
            code = stop.code
        except Exception as error:  # noqa: BLE001 -- an answer, too
            code = f"{type(error).__name__}: {error}"
    said = {"code": str(code)} | {
        name: plain.text(stream.getvalue(), place)
        for name, stream in (("stdout", out), ("stderr", err))
    }
    if words[:2] == ["highwater", "doctor"]:  # what is free and installed here, this minute
        said["stdout"] = re.sub(
            r'("host_memory\w+|"\w[\w-]+"): ("?[\d.]+\S*|\S+\+cpu")', r"\1", said["stdout"]
        )
    if words[-1] == "--help":
        said["flags"] = flags(said["stdout"])
    return {
        name: plain.short(each) if isinstance(each, str) else each for name, each in said.items()
    }


def flags(told: str) -> dict[str, list[str]]:
    """Each flag of a page of help, with its choices and its default."""
    blocks = [" ".join(block.split()) for block in re.split(r"\n  (?=-)", told)[1:]]
    return {block.split()[0]: re.findall(r"\{[^}]*\}|default: [^);]*", block) for block in blocks}


def run(program: str) -> Any:
    if program == "highwater":
        return runpy.run_module("highwater", run_name="__main__", alter_sys=True)
    scripts = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts[program].partition(":")
    return getattr(importlib.import_module(module), name)()


def written(place: Path) -> dict[str, Any]:
    (place / "dry.yaml").unlink()
    found = plain.files(place, place)
    for path in place.rglob("*.html"):  # what a page is drawn from, beside how it looks
        for number, data in enumerate(
            re.findall(
                r"<script type=.application/json[^>]*>(.*?)</script>", path.read_text(), re.S
            )
        ):
            found[f"{path.name} data {number}"] = plain.short(plain.text(data, place))
    return found


def in_python() -> Iterator[tuple[str, Callable[[], Any]]]:
    import highwater

    for study in STUDIES:
        yield f"python: keys of {study}", lambda study=study: keys(highwater.open_study(study))


def signature(named: Any) -> list[str]:
    """Names and defaults: where a type stands may change, and where a function lies."""
    return [
        f"{each.kind.name} {each.name} {getattr(each.default, '__name__', repr(each.default))}"
        for each in inspect.signature(named).parameters.values()
    ]


def keys(study: Any) -> dict[str, Any]:
    trials = [trial.spec.key for trial in study.trials]
    return {"question": study.question.key, "trials": trials}


def told(ask: Callable[[], Any]) -> Any:
    """What a function answers, or why not: of a refusal its words, whatever its class is called."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 -- an answer, too
        if hasattr(error, "hint"):
            return {"refused": str(getattr(error, "problem", error)), "hint": error.hint}
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.exit(run(sys.argv[0]))
