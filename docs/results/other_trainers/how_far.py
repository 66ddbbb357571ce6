"""How far the trainers that ``highwater emit`` writes for run on a machine without a GPU.

    python docs/results/other_trainers/how_far.py --venvs DIR
    python docs/results/other_trainers/how_far.py --venvs DIR --only llamafactory ms-swift
    python docs/results/other_trainers/how_far.py --venvs DIR --ready
    python docs/results/other_trainers/how_far.py --table

``DIR/<trainer>`` is an environment with that trainer in it (tests/emit/requirements has what its
parser imports; what training imports beside is in how_far.md). Each trainer's own entry point is
started three times, under a time limit: for its help, on what ``highwater emit`` wrote for a model
of two layers, and, where two steps of that were done, by ``highwater find --trainer command``
until memory runs out. ``--ready`` does the same search by ``find --trainer NAME`` alone, for the
trainers that are ready. What came of it goes to how_far.json.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from highwater.trainers.logs import log_lines, progress_of
from highwater.trials.foreign_classify import ending_error, errors_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RECORD = HERE / "how_far.json"
STEPS = 2
LENGTH = 1024
LIMIT_S = 240
"""Seconds until a start is ended: two steps take 15 to 60 on two cores."""
FIND_LIMIT_S = 1500
KEPT_LINES = 6
KEPT_CHARACTERS = 240
SEARCH = ("--memory", "5GiB", "--start-length", "512", "--resolution", "512")
SEARCH += ("--max-length", "8192", "--timeout", "5m")
READY: Mapping[str, str] = {
    "llamafactory": "",
    "axolotl": "",
    "ms-swift": "model_type: qwen3\ntemplate: qwen3\ntuner_type: full\ntorch_dtype: bfloat16\n"
    "bf16: true\nattn_impl: sdpa\n",
}
"""The user's own file of the trainers that are ready; empty: none. ms-swift has to be told what a
directory is that is not called as on the Hub."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "DO_NOT_TRACK": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Nothing is fetched, nothing is told to anybody, and no GPU is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trainer: its package, its entry point, and what its emitted files lack here."""

    package: str
    help: str
    """What starts its entry point for its help."""
    start: str
    """What starts it on the emitted files, in their folder: with the data, and with what a CPU
    wants otherwise."""
    other: str | None = None
    """Another entry point of it that trains, on nothing emitted."""
    emitted: Sequence[str] = ()
    """Flags of ``highwater emit`` beside the model, its length and a GPU."""
    gpus: int = 1
    filled: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """What is replaced in the emitted files: by file, text by text."""
    beside: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files that the user brings, by name."""
    added: Mapping[str, str] = field(default_factory=dict[str, str])
    """What is added at the end of emitted files: the user's part, by file."""
    ray: bool = False
    """Whether it joins a Ray cluster that runs."""
    find: str | None = None
    """What ``find --trainer command`` starts; None where two steps cannot be done here."""


AREAL_TRAIN = """\
import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import load_dataset

config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
rows = load_dataset("json", data_files=config.train_dataset.path, split="train")
with PPOTrainer(config, train_dataset=rows, valid_dataset=None) as trainer:
    trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow")
"""
"""Its own examples' script, without their data and rewards."""
TRINITY_ADDED = """\
algorithm:
  algorithm_type: grpo
  repeat_times: 8
buffer:
  batch_size: 1
  total_steps: 2
  explorer_input:
    taskset:
      name: rows
      storage_type: file
      path: ..
    default_workflow_type: fixed_length
  trainer_input:
    experience_buffer:
      name: experience
      storage_type: queue
synchronizer:
  sync_method: nccl
  sync_interval: 1
checkpoint_root_dir: ${oc.env:PWD}/output
"""
TRINITY_PLUGIN = """\
import torch
from trinity.common.experience import Experience
from trinity.common.workflows import WORKFLOWS
from trinity.common.workflows.workflow import SimpleWorkflow

LENGTH, PROMPT = 1024, 256


@WORKFLOWS.register_module("fixed_length")
class FixedLength(SimpleWorkflow):
    def run(self):
        tokens = torch.arange(LENGTH, dtype=torch.int32) % 1000
        answer = torch.zeros(LENGTH - PROMPT)
        return [
            Experience(
                tokens=tokens, prompt_length=PROMPT, logprobs=answer, reward=torch.tensor(0.0)
            )
            for _ in range(self.repeat_times)
        ]
"""
"""Experience of one length, of which nothing was generated, as its published test feeds it."""
_LLAMAFACTORY = (
    "llamafactory-cli train llamafactory.yaml dataset_dir=.. dataset=rows template=empty "
    "use_cpu=true logging_steps=1 report_to=none"
)
AXOLOTL_FSDP = """\
fsdp_version: 2
fsdp_config:
  offload_params: false
  activation_checkpointing: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  state_dict_type: SHARDED_STATE_DICT
  cpu_ram_efficient_loading: true
  reshard_after_forward: true
"""
"""What transformers refuses without a GPU: "Using fsdp only works in distributed training."."""
_AXOLOTL = (
    "axolotl train axolotl.yaml --attn-implementation sdpa --excess-length-strategy truncate "
    "--logging-steps 1"
)
_SWIFT = (
    "swift sft ms-swift.yaml --dataset ../rows.jsonl --model_type qwen3 --template qwen3 "
    "--attn_impl sdpa --packing false --truncation_strategy right --use_cpu true "
    "--logging_steps 1 --report_to none"
)
TRAINERS: Mapping[str, Row] = {
    "trinity": Row(
        package="trinity-rft",
        help="trinity run --help",
        start="trinity run --config trinity.yaml --plugin-dir plugins",
        emitted=("--rollout-gpus", "1"),
        gpus=2,
        added={"trinity.yaml": TRINITY_ADDED},
        beside={"plugins/fixed_length.py": TRINITY_PLUGIN},
        ray=True,
    ),
    "verl": Row(
        package="verl",
        help="python3 -m verl.trainer.main_ppo --help",
        start="bash verl.sh data.train_files=WORK/rows.jsonl data.val_files=WORK/rows.jsonl "
        "actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=grpo "
        "critic.model.path=WORK/tiny trainer.logger=[console] "
        "trainer.total_training_steps=2",
        other="python3 -m torch.distributed.run --standalone --nproc_per_node=1 "
        "-m verl.trainer.sft_trainer model.path=WORK/tiny data.train_files=WORK/rows.parquet "
        "data.train_batch_size=1 data.micro_batch_size_per_gpu=1 data.use_dynamic_bsz=False "
        "data.max_length=1024 data.truncation=right data.num_workers=0 trainer.logger=[console] "
        "trainer.device=cpu trainer.total_training_steps=2 trainer.default_local_dir=output",
        ray=True,
    ),
    "areal": Row(
        package="areal",
        help="python3 train.py --help",
        start="python3 train.py --config areal.yaml",
        emitted=("--rollout-gpus", "1"),
        gpus=2,
        filled={
            "areal.yaml": {
                "cluster:\n": "cluster:\n  fileroot: output\n",
                "actor:\n": "actor:\n  attn_impl: sdpa\n",
            }
        },
        beside={"train.py": AREAL_TRAIN},
    ),
    "torchtitan": Row(
        package="torchtitan",
        help="python3 -m torchtitan.train --module torchtitan_settings --config train --help",
        start="python3 -m torch.distributed.run --nproc_per_node=1 -m torchtitan.train "
        "--module torchtitan_settings --config train --training.steps 2",
        other="python3 -m torch.distributed.run --nproc_per_node=1 -m torchtitan.train "
        "--module llama3 --config llama3_debugmodel --training.steps 2",
    ),
    "axolotl": Row(
        package="axolotl",
        help="axolotl train --help",
        start=f"{_AXOLOTL} --max-steps 2 --output-dir output --dataset-prepared-path prepared",
        filled={
            "axolotl.yaml": {
                "REPLACE-WITH-YOUR-DATASET": "../rows.jsonl",
                "bf16: true\n": "bf16: false\n",
                AXOLOTL_FSDP: "",
            }
        },
        find=f"{_AXOLOTL} --sequence-len {{length}} --max-steps {{steps}} --output-dir {{output}} "
        "--dataset-prepared-path {output}/prepared",
    ),
    "llamafactory": Row(
        package="llamafactory",
        help="llamafactory-cli train --help",
        start=f"{_LLAMAFACTORY} max_steps=2 output_dir=output",
        find=f"{_LLAMAFACTORY} cutoff_len={{length}} max_steps={{steps}} output_dir={{output}}",
    ),
    "ms-swift": Row(
        package="ms-swift",
        help="swift sft --help",
        start=f"{_SWIFT} --max_steps 2 --output_dir output",
        find=f"{_SWIFT} --max_length {{length}} --max_steps {{steps}} --output_dir {{output}}",
    ),
}


def main() -> None:
    """Try every trainer that was named, and record each before the next."""
    words = arguments()
    if not words.table:
        with tempfile.TemporaryDirectory(prefix="how-far-") as place:
            work = Path(place).resolve()
            venvs = words.venvs.resolve()
            maker = venvs / "llamafactory" / "bin" / "python"
            made = [maker, HERE / "tiny_model.py", ROOT / "examples" / "tiny", work]
            subprocess.run(made, check=True, env=os.environ | QUIET)
            for name in words.only:
                if words.ready:
                    found = recorded()[name] | {"ready": ready(name, venvs / name, work)}
                else:
                    found = tried(name, venvs / name, work, is_searched=not words.no_find)
                record = json.dumps(recorded() | {name: found}, indent=1, sort_keys=True)
                RECORD.write_text(record + "\n")
                print(name, found["emitted"], flush=True)
    print(table(recorded()))
    print()
    print(table_of_searches(recorded()))


def recorded() -> dict[str, Any]:
    """What is recorded, by trainer."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def arguments() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--venvs", type=Path, help="environments, one folder for each trainer")
    parser.add_argument("--only", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--no-find", action="store_true", help="without the searches")
    parser.add_argument("--ready", action="store_true", help="the searches by name, alone")
    parser.add_argument("--table", action="store_true", help="print what is recorded, try nothing")
    words = parser.parse_args()
    if not words.table and words.venvs is None:
        parser.error("--venvs DIR, or --table")
    if words.ready:
        words.only = [name for name in words.only if name in READY]
    return words


def tried(name: str, venv: Path, work: Path, *, is_searched: bool) -> dict[str, Any]:
    """Everything that one trainer was started for."""
    row, folder = TRAINERS[name], work / name
    emit = ["emit", "--for", name, work / "tiny", "--length", str(LENGTH), *row.emitted]
    emit += ["--gpus", f"{row.gpus}xH200-141GB", "-o", folder]
    subprocess.run(highwater(*emit), check=True, capture_output=True, cwd=work)
    for file, texts in row.filled.items():
        written = (folder / file).read_text()
        for old, new in texts.items():
            written = written.replace(old, new)
        (folder / file).write_text(written)
    for file, text in row.added.items():
        with (folder / file).open("a") as written:
            written.write(text)
    for file, text in row.beside.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    names = {
        str(work): "WORK",
        str(venv): "VENV",
        str(venv.parent): "VENVS",
        str(ROOT): "HIGHWATER",
    }
    with ray_of(venv) if row.ray else nothing() as cluster:
        environment = environment_of(venv, folder) | cluster
        helped = started(row.help, folder, environment, names)
        trained = started(row.start, folder, environment, names)
        other = None if row.other is None else started(row.other, folder, environment, names)
    found = {
        "package": row.package,
        "versions": versions(venv, row.package),
        "help": helped,
        "emitted": trained | {"filled": row.filled, "beside": list(row.beside)},
    }
    found |= {} if other is None else {"other": other}
    if row.find is None or not is_searched or trained["steps_seen"] < STEPS:
        return found
    by_command = ("--trainer", "command", "--command", row.find)
    return found | {"find": searched(by_command, folder, environment, names)}


def ready(name: str, venv: Path, work: Path) -> dict[str, Any]:
    """What ``find --trainer NAME`` answers, with one micro-batch, as the emitted files have it."""
    folder = work / name
    folder.mkdir()
    typed = ["--trainer", name, "--micro-batches", "1"]
    if READY[name]:
        (folder / "base.yaml").write_text(READY[name])
        typed += ["--trainer-config", "base.yaml"]
    names = {
        str(work): "WORK",
        str(venv): "VENV",
        str(venv.parent): "VENVS",
        str(ROOT): "HIGHWATER",
    }
    return searched(typed, folder, environment_of(venv, folder), names)


def environment_of(venv: Path, folder: Path) -> dict[str, str]:
    """The shell's environment with the trainer's programs first, and its own folder's modules."""
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    data = str(folder.parent / "rows.jsonl")
    return os.environ | QUIET | {"PATH": path, "PYTHONPATH": str(folder), "DATASET": data}


def started(
    command: str, folder: Path, environment: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, Any]:
    """How a command ended, and what its log shows."""
    began, log = time.monotonic(), folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [word.replace("WORK", str(folder.parent)) for word in command.split()],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    lines = log_lines(log.read_text(errors="replace"))
    done = progress_of(lines, steps=STEPS)
    error = ending_error(errors_of(lines, device="cpu"), progress_at=done.at)
    last = [line.text for line in lines if line.text.strip(" ─╰╯│")][-KEPT_LINES:]
    return {
        "command": command,
        "exit_code": code,
        "wall_s": round(time.monotonic() - began, 1),
        "steps_seen": min(done.steps, STEPS),
        "error": None if error is None else stripped(error.said, names),
        "last_lines": [stripped(line, names)[:KEPT_CHARACTERS] for line in last],
    }


def searched(
    trainer: Sequence[str], folder: Path, environment: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, Any]:
    """What ``find`` answers for a trainer, and its trials, of one of which memory ran out."""
    words = ["find", "../tiny", "--device", "cpu", "--gpus", "1", *SEARCH, *trainer]
    typed = highwater(*words, "--study", "study.jsonl", "--log-dir", "logs", "--json")
    done = subprocess.run(
        typed,
        cwd=folder,
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=FIND_LIMIT_S,
        check=False,
    )
    answer = json.loads(done.stdout) if done.stdout.strip() else {}
    found = {
        "flags": words[1:],
        "exit_code": done.returncode,
        "said": done.stderr.splitlines()[-KEPT_LINES:],
        "answers": [short(each, ANSWERED) for each in answer.get("answers", ())],
        "trials": [
            {"length_tokens": trial["spec"]["length_tokens"], **short(trial["result"], TRIED)}
            for trial in answer.get("trials", ())
        ],
    }
    return json.loads(stripped(json.dumps(found), names))


ANSWERED = ("capacity_tokens", "does_not_fit_tokens", "reason", "peak_reserved_bytes")
TRIED = ("outcome", "reason", "exit_code", "wall_s")


def short(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields of a record that are kept."""
    return {name: record[name] for name in names}


def highwater(*words: str | Path) -> list[str]:
    """A command of highwater's by this Python."""
    return [sys.executable, "-m", "highwater", *map(str, words)]


def versions(venv: Path, package: str) -> dict[str, str]:
    """Versions of the trainer, and of what it stands on."""
    program = (
        "import json, sys\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = version(name)\n"
        "    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    beneath = ("torch", "transformers", "accelerate", "trl", "ray")
    words = [venv / "bin" / "python", "-c", program, package, *beneath]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@contextmanager
def ray_of(venv: Path) -> Iterator[dict[str, str]]:
    """A Ray of the environment's own on the loopback interface, with a GPU that is not there."""
    address = "127.0.0.1:6390"
    with tempfile.TemporaryDirectory(prefix="r-") as place:
        words = [venv / "bin" / "ray", "start", "--head", "--port", "6390", "--block"]
        words += ["--node-ip-address", "127.0.0.1", "--num-cpus", "16", "--num-gpus", "2"]
        words += ["--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", place]
        path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            list(map(str, words)),
            env=os.environ | {"PATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_for(venv, address)
            yield {"RAY_ADDRESS": address}
        finally:
            end(process)


def wait_for(venv: Path, address: str) -> None:
    """Return when a cluster answers."""
    for _ in range(30):
        asked = [str(venv / "bin" / "ray"), "status", "--address", address]
        if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(1)
    raise TimeoutError(f"no Ray at {address}")


@contextmanager
def nothing() -> Iterator[dict[str, str]]:
    """No cluster."""
    yield {}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            time.sleep(2)
        except ProcessLookupError:
            break
    process.wait()


def stripped(text: str, names: Mapping[str, str]) -> str:
    """Text with names where paths of this machine stood."""
    for path in sorted(names, key=len, reverse=True):
        text = text.replace(path, names[path])
    return text.replace(str(Path.home()), "HOME").replace(tempfile.gettempdir(), "TMP")


def why(trained: Mapping[str, Any]) -> str:
    """What ended a start that was not done: its last error, or the last line that names one."""
    named = (line for line in reversed(trained["last_lines"]) if "Error" in line)
    error = trained["error"] or next(named, None)
    late = "the time limit" if trained["exit_code"] is None else None
    return "; then ".join(filter(None, (error, late))) or "no error in its log"


def table(found: Mapping[str, Any]) -> str:
    """The record as a table in Markdown."""
    lines = [
        "| trainer | version | help | emitted files | steps | ended by |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        trained, version = row["emitted"], row["versions"].get(row["package"], "?")
        ended = "done" if trained["exit_code"] == 0 else why(trained)
        help_s = f"exit {row['help']['exit_code']}"
        lines.append(
            f"| {name} | {version} | {help_s} | exit {trained['exit_code']} "
            f"| {trained['steps_seen']} | {ended} |"
        )
    return "\n".join(lines)


def tokens(number: int | None) -> str:
    """A length for readers."""
    return "" if number is None else f"{number:,}"


def table_of_searches(found: Mapping[str, Any]) -> str:
    """The searches by a command and by the trainer's name, as a table in Markdown."""
    lines = [
        "| trainer | started by | longest that fit | ran out of memory | trials | time of trials "
        "| data segment, sampled |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        for kind, started_by in (("find", "`--trainer command`"), ("ready", f"`--trainer {name}`")):
            for answer in row.get(kind, {}).get("answers", ()):
                trials, peak = row[kind]["trials"], answer["peak_reserved_bytes"]
                lines.append(
                    f"| {name} | {started_by} | {tokens(answer['capacity_tokens'])} "
                    f"| {tokens(answer['does_not_fit_tokens'])} | {len(trials)} "
                    f"| {sum(trial['wall_s'] for trial in trials):.0f} s "
                    f"| {'' if peak is None else f'{peak / 1024**3:.2f} GiB'} |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
