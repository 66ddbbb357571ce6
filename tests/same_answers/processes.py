"""Questions that take torch."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import plain

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
TEXT = "A line to train on, as good as any other.\n" * 60
PAIRS = [{"prompt": "Why?", "chosen": f" Because of {at}.", "rejected": " No."} for at in range(4)]
ROLLOUTS = [
    {"prompt": "Why?", "response": f" Because of {at}.", "reward": at / 4, "group": at // 2}
    for at in range(4)
]
TRAININGS = {
    "sft": ("text.txt",),
    "adamw-8bit": ("text.txt", "--optimizer", "adamw-8bit"),
    "lora": ("text.txt", "--lora", "4"),
    "lora merged, offload": ("text.txt", "--lora", "4", "--lora-merged", "--offload"),
    "fsdp1 on two ranks": ("text.txt", "--strategy", "fsdp", "--gpus", "2"),
    "ulysses on two ranks": ("text.txt", "--gpus", "2", "--ulysses", "2"),
    "dpo": ("pairs.jsonl", "--objective", "dpo"),
    "grpo": ("rollouts.jsonl", "--objective", "grpo"),
    "ppo with a critic": ("rollouts.jsonl", "--objective", "ppo", "--critic"),
}
"""Checkpoints of each kind: the data, and the settings."""
FOREIGN = (
    "import sys; print('step 1/2 loss 1.0', flush=True); int(sys.argv[1]) > 256 and "
    "sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.'); "
    "print('step 2/2 loss 0.9')"
)
"""A trainer of somebody's: in the command itself, which names a study, and so without a path."""

Answers = list[tuple[str, Any]]


def questions(folder: Path, runs: Path) -> Iterator[tuple[str, Callable[[], Answers]]]:
    """Yield names, each with what asks all that goes by it."""
    runs.mkdir(parents=True, exist_ok=True)
    model = runs / "small"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (runs / "text.txt").write_text(TEXT)
    for name, rows in (("pairs", PAIRS), ("rollouts", ROLLOUTS)):
        (runs / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (runs / "short.yaml").write_text("max_length: 256\n")
    yield "python: the data plane", partial(data_plane, folder, runs)
    for name, (data, *words) in TRAININGS.items():
        yield f"train {name}", partial(trained, name, runs / data, words, runs)
    for number, (name, module, words) in enumerate(trials(model, runs)):
        yield name, partial(tried, name, [module, *words], folder / f"real-{number}")


def trials(model: Path, runs: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield a name, the module that is run, and its words, with FOLDER for a new folder."""
    here = (str(model), "--device", "cpu", "--gpus", "1", "--memory", "1GiB")
    logs = ("--log-dir", "FOLDER/logs")
    grid = ("--start-length", "128", "--resolution", "128", "--max-length", "256")
    saved = ("--checkpoint", "sharded", "--save-hf", "always", "--checkpoint-dir", "FOLDER/saved")
    highwater = "highwater"
    yield "try", highwater, ("try", *here, "--length", "128", *saved, *logs, "--json")
    yield "find", highwater, ("find", *here, *grid, *logs, "--loss", "full", "--json")
    foreign = f"python3 -c {shlex.quote(FOREIGN)} {{length}}"
    words = ("--trainer", "command", "--command", foreign, "--start-length", "128")
    more = ("--resolution", "128", "--max-length", "512", *logs, "--json")
    yield "find --trainer command", highwater, ("find", *here, *words, *more)
    exact = ("--length", "512", "--exact", "--timeline", "FOLDER/timeline.pickle", "--json")
    yield "predict --exact", highwater, ("predict", str(model), "--gpus", "1xH100-80GB", *exact)
    attention = ("--lengths", "256", "--implementations", "dense", "window", "--only", "forward")
    bench = ("bench", "attention", "--device", "cpu", "--memory", "2GiB", *attention)
    yield "bench", highwater, (*bench, "--json", "--out", "FOLDER/report")
    loop = ("--nproc", "2", "examples/own_loop.py", str(model))
    yield "own loop on two ranks", "highwater.engine.ranks", loop
    published = ("--model_path", str(model), "--test_gpu_num", "1", "--memory", "1GiB")
    short = ("--config", str(runs / "short.yaml"), "--start_length", "128")
    path = ("--log_dir", "FOLDER/logs", "--checkpoint_path", "FOLDER/saved")
    yield "the published script", "search_context_length_capacity", (*published, *short, *path)


def trained(name: str, data: Path, words: list[str], runs: Path) -> Answers:
    """Two steps, then a third after the checkpoint that lay there before, or the one just made."""
    run, kept = runs / name.replace(" ", "-"), runs / f"{name.replace(' ', '-')}.kept"
    if run.exists():
        run.rename(kept)
    typed = ["highwater", "train", str(runs / "small"), "--data", str(data), "--length", "128"]
    typed += ["--device", "cpu", "--memory", "2GiB", "--seed", "7", "--learning-rate", "1e-3"]
    typed += ["--output", str(run)]
    typed += [*words, *(() if "--gpus" in words else ("--gpus", "1")), "--json"]
    two = {**ended([*typed, "--steps", "2"], runs), "files": plain.files(run, runs)}
    if kept.exists():
        shutil.rmtree(run)
        kept.rename(run)
    if run.exists():
        shutil.copytree(run, kept)
    three = {**ended([*typed, "--steps", "3"], runs), "files": plain.files(run, runs)}
    shutil.rmtree(run, ignore_errors=True)
    if kept.exists():
        kept.rename(run)
    return [(f"train {name}: two steps", two), (f"train {name}: goes on", three)]


def tried(name: str, words: list[str], place: Path) -> Answers:
    place.mkdir()
    answer = ended([word.replace("FOLDER", str(place)) for word in words], place)
    return [(name, {**answer, "files": [*plain.files(place, place)]})]


def data_plane(folder: Path, runs: Path) -> Answers:
    place, out = folder / "data-plane", folder / "data-plane.json"
    place.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("data_plane.py")), str(out)]
    done = subprocess.run(
        [*command, str(place), str(runs / "small")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return [("python: the data plane", done.stderr[-2000:])]
    return list(json.loads(out.read_text("utf-8")).items())


def ended(words: list[str], place: Path) -> dict[str, Any]:
    """How a program ends, and what it prints; what it says on the way has times in it, and is kept
    where it refuses.
    """
    program = [sys.executable, "-m", words[0]]
    if "." not in words[0] and words[0] != "highwater":  # a script that is installed
        program = [sys.executable, str(Path(__file__).with_name("typed.py")), words[0]]
    done = subprocess.run(
        [*program, *words[1:]], capture_output=True, text=True, check=False, timeout=900
    )
    said = plain.document(plain.text(done.stdout, place))
    why = plain.text(done.stderr[-2000:], place) if done.returncode in (2, 3, 70) else ""
    return {"code": done.returncode, "stdout": said, "stderr": why}
