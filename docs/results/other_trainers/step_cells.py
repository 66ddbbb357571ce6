"""Peaks of transformers' own Trainer beside what ``predict --trainer transformers`` says of them:
21 steps, of 0.6B to 8B parameters, with LoRA and everything trained, Liger's kernels and offload on
and off, on one GPU, on two with FSDP2 and with DDP; the edges of four of them in 24 GiB; and nine
steps on two with DeepSpeed's ZeRO, which nobody has run yet.

    python docs/results/other_trainers/step_cells.py --predict
    python docs/results/other_trainers/step_cells.py --measure
    python docs/results/other_trainers/step_cells.py --table
    python docs/results/other_trainers/step_cells.py --left-out

``step_cells.json`` beside this file has a row for each. ``--predict`` needs no GPU; a trace is made
where there is one GPU. ``--measure`` gives each case GPUs of its own, so that several run side by
side, each in fresh processes; models have the catalog's shapes and random weights. The peak is that
of the second step, after Trainer has prepared everything; a step is not timed. An edge is
a length that is predicted to fit in 24 GiB, less what lies outside the allocator by prediction, and
the lengths 1,024 and 4,096 tokens above. Rows that are there are not predicted anew: of the first
16 the closed form is that of before they ran, and was set right by them. ``--left-out`` says how
far the closed form of now is off, and what an interval does that other models' steps teach.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

GIB = 1024**3
FILE = Path(__file__).with_suffix(".json")
EXPANDABLE = dict.fromkeys(
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
)
LONGEST_S = 150
"""Seconds that a case may take."""
EDGE_GIB, EDGE_TOKENS, EDGE_STEPS = 24, 1024, (0, 1, 4)


class Case(NamedTuple):
    """One training by Trainer."""

    model: str
    length_tokens: int
    lora: int | None = None
    liger: bool = False
    offload: bool = False
    narrow: bool = False
    """Parameters in bfloat16, as are AdamW's states."""
    gpus: int = 1
    sharded: bool = True
    """On several GPUs: by FSDP2, else DDP."""
    micro_batches: int = 1
    zero: str = ""
    """DeepSpeed's ZeRO, as ``--deepspeed`` has it; empty: none."""
    bucket: int = 0
    """Numbers of its bucket of gradients; 0: ``auto``."""

    @property
    def name(self) -> str:
        """The case in words."""
        whole = "whole" if self.zero else "bf16" if self.narrow else "autocast"
        trained = f"LoRA {self.lora}" if self.lora else whole
        how = ", Liger" * self.liger + ", offload" * self.offload
        by = self.zero or ("FSDP2" if self.sharded else "DDP")
        shared = "" if self.gpus == 1 else f", {by} {self.gpus}"
        shared += f" in buckets of {self.bucket:,}" if self.bucket else ""
        several = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.model}, {trained}{how}{shared}{several}, {self.length_tokens:,} tokens"

    @property
    def asked(self) -> list[str]:
        """What ``highwater predict`` is asked."""
        return [
            *("predict", self.model, "--gpus", f"{self.gpus}xH100-80GB"),
            *("--trainer", "transformers", "--allocator", "expandable"),
            *("--loss", "chunked" if self.liger else "full"),
            *("--activations", "host" if self.offload else "gpu"),
            *("--micro-batches", str(self.micro_batches)),
            *(("--lora", str(self.lora)) if self.lora else ()),
            *(("--parameters", "bf16", "--optimizer", "adamw-bf16") if self.narrow else ()),
            *(() if self.gpus == 1 or self.sharded else ("--copies", str(self.gpus))),
            *(("--deepspeed", self.zero) if self.zero else ()),
            *(("--deepspeed-bucket", str(self.bucket)) if self.bucket else ()),
        ]


CASES = (
    Case("Qwen3-0.6B", 8192),
    Case("Qwen3-0.6B", 65_536, liger=True),
    Case("Qwen3-0.6B", 98_304, liger=True, offload=True),
    Case("Qwen3-0.6B", 32_768, liger=True, narrow=True),
    Case("Qwen3-1.7B", 16_384, liger=True, micro_batches=2),
    Case("Qwen3-1.7B", 8192, lora=16),
    Case("Qwen3-4B", 32_768, lora=16, liger=True, micro_batches=2),
    Case("Qwen3-4B", 32_768, liger=True, offload=True, narrow=True),
    Case("Llama-3.1-8B", 16_384, lora=32),
    Case("Llama-3.1-8B", 65_536, lora=32, liger=True),
    Case("Qwen3-8B", 65_536, lora=8, liger=True, offload=True),
    Case("Qwen3-8B", 8192, liger=True, narrow=True),
    Case("Qwen3-0.6B", 8192, gpus=2),
    Case("Qwen3-4B", 32_768, liger=True, gpus=2),
    Case("Llama-3.1-8B", 32_768, lora=32, liger=True, gpus=2),
    Case("Llama-3.1-8B", 16_384, lora=32, gpus=2),
    Case("Qwen3-1.7B", 16_384, liger=True, gpus=2, sharded=False),
)
AFTERWARDS = (
    Case("Qwen3-1.7B", 65_536, liger=True, gpus=2),
    Case("Qwen3-4B", 8192, lora=16, gpus=2),
    Case("Qwen3-1.7B", 4096, narrow=True),
    Case("Llama-3.1-8B", 8192, lora=64, micro_batches=2),
    Case("Qwen3-4B", 65_536, lora=64, liger=True, offload=True),
)
"""Predicted when the closed form had been set right by the cases above."""
BY_ZERO = (
    Case("Qwen3-1.7B", 32_768, liger=True, gpus=2, zero="zero3"),
    Case("Qwen3-1.7B", 16_384, liger=True, gpus=2, zero="zero2"),
    Case("Qwen3-1.7B", 32_768, liger=True, gpus=2, zero="zero3-optimizer-offload"),
    Case("Qwen3-4B", 8192, gpus=2, zero="zero3"),
    Case("Llama-3.1-8B", 32_768, lora=32, liger=True, gpus=2, zero="zero3"),
    Case("Qwen3-4B", 32_768, liger=True, offload=True, gpus=2, zero="zero3-offload"),
    Case("Qwen3-1.7B", 32_768, liger=True, gpus=2, zero="zero2-offload"),
    Case("Qwen3-1.7B", 16_384, liger=True, gpus=2, zero="zero3", bucket=500_000_000),
    Case("Qwen3-4B", 16_384, liger=True, gpus=2, zero="zero2", micro_batches=2),
)
"""Predicted by DeepSpeed's source alone; whoever runs them needs ``pip install deepspeed``."""
BY_ZERO_AFTERWARDS = (
    Case("Qwen3-0.6B", 65_536, liger=True, gpus=2, zero="zero3"),
    Case("Qwen3-4B", 16_384, lora=16, gpus=2, zero="zero3"),
    Case("Qwen3-8B", 32_768, lora=64, liger=True, gpus=2, zero="zero3"),
    Case("Llama-3.2-3B", 32_768, liger=True, gpus=2, zero="zero3-optimizer-offload"),
)
"""Predicted when the law had been set right by those."""
EDGES = (
    Case("Qwen3-0.6B", 0),
    Case("Qwen3-0.6B", 0, liger=True),
    Case("Qwen3-1.7B", 0, lora=16, liger=True),
    Case("Qwen3-4B", 0, lora=16, liger=True, offload=True),
)
TIGHT = BY_ZERO[5]
"""Reserved 2.9 times what its tensors filled, where there was room."""
ROOM = 1.1
SMALL = (
    Case("tiny", 256, lora=4, liger=False),
    Case("tiny", 256, gpus=2, micro_batches=2),
    Case("tiny", 256, gpus=2, lora=4),
    Case("tiny", 256, gpus=2, sharded=False),
    Case("tiny", 256, gpus=2, zero="zero3"),
)


def main() -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--small", action="store_true", help="on the CPU, to try this script")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.run:
        train(Case(*json.loads(words.run)))
        return
    rows: dict[str, Any] = json.loads(words.file.read_text()) if words.file.is_file() else {}
    if words.predict:
        rows |= dict(predicted(rows))
        words.file.write_text(json.dumps(rows, indent=1) + "\n")
    if words.small:
        for name, found in measured([(case, None) for case in SMALL], gpus=2):
            print(json.dumps({name: found}), flush=True)
    if words.measure:
        import torch

        asked = [
            (Case(**row["case"]), row.get("budget_bytes"))
            for row in rows.values()
            if "measured" not in row
        ]
        for name, found in measured(asked, gpus=torch.cuda.device_count()):
            rows[name]["measured"] = found
            words.file.write_text(json.dumps(rows, indent=1) + "\n")
            print(name, json.dumps(found)[:300], flush=True)
    print(left_out(rows) if words.left_out else table(rows))


def left_out(rows: dict[str, Any]) -> str:
    """For each model what the steps of the others teach of its own: reserved, with the context."""
    from highwater.memory.interval.calibration import factors_of

    shares: dict[str, list[float]] = {}
    for row in rows.values():
        if "reserved_bytes" not in row.get("measured", {}) or "predicted_to_fit" in row:
            continue
        case = Case(**row["case"])
        if case.zero:  # which reserves what it has room for
            continue
        now = row_of(case, answer([*case.asked, "--length", str(case.length_tokens)]))["predicted"]
        took = row["measured"]["reserved_bytes"] + now["outside_bytes"]
        said = now["reserved_bytes"] + now["outside_bytes"]
        shares.setdefault(case.model, []).append(took / said)
    lines = [
        "| model | steps | took, of the prediction | more than it | interval of the others "
        "| above it | below it |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model, own in shares.items():
        others = [each for name, told in shares.items() if name != model for each in told]
        ends = factors_of(others, "expandable")
        if ends is None:  # one model alone
            continue
        more = [sum(share > most for share in own) for most in (1, ends.upper)]
        less = sum(share < ends.lower for share in own)
        lines.append(
            f"| {model} | {len(own)} | {min(own):.3f} to {max(own):.3f} | {more[0]} "
            f"| {ends.lower:.3f} to {ends.upper:.3f} | {more[1]} | {less} |"
        )
    return "\n".join(lines)


def predicted(rows: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """A row for each case and for both sides of each edge, with what the closed form and the trace
    say before anything runs. What was said before a run stays: such rows are not made again.
    """
    for case in CASES + AFTERWARDS + BY_ZERO + BY_ZERO_AFTERWARDS:
        if case.name in rows:
            continue
        cell = answer([*case.asked, "--length", str(case.length_tokens)])
        row = row_of(case, cell)
        if case.gpus == 1:
            traced = answer([*case.asked, "--length", str(case.length_tokens), "--exact"])
            of_trace = traced["replayed"]
            row["predicted"]["trace_allocated_bytes"] = of_trace["peak_allocated_bytes"]
            row["predicted"]["trace_reserved_bytes"] = of_trace["peak_reserved_bytes"]
        yield case.name, row
    for case in () if any("predicted_to_fit" in row for row in rows.values()) else EDGES:
        room = ("--gpu-memory", f"{EDGE_GIB}GiB", "--headroom", "0")
        asked = [*case.asked, *room, "--resolution", str(EDGE_TOKENS)]
        longest = answer(asked)["likely_tokens"]
        for length in (longest + steps * EDGE_TOKENS for steps in EDGE_STEPS):
            at = case._replace(length_tokens=length)
            row = row_of(at, answer([*at.asked, "--length", str(length)]))
            outside = row["predicted"]["outside_bytes"]
            row |= {"budget_bytes": EDGE_GIB * GIB - outside, "predicted_to_fit": length == longest}
            yield f"edge of {at.name}", row

    if f"edge of {TIGHT.name}" not in rows:
        row = row_of(TIGHT, answer([*TIGHT.asked, "--length", str(TIGHT.length_tokens)]))
        budget = int(ROOM * row["predicted"]["allocated_bytes"])
        row |= {"budget_bytes": budget, "predicted_to_fit": True}
        yield f"edge of {TIGHT.name}", row


def row_of(case: Case, cell: dict[str, Any]) -> dict[str, Any]:
    """What is recorded before a case runs."""
    footprint = cell["footprint"]
    phases = [sum(term["bytes"] for term in phase["terms"]) for phase in footprint["phases"]]
    return {
        "case": case._asdict(),
        "asked": " ".join(("highwater", *case.asked)),
        "predicted": {
            "allocated_bytes": max(phases),
            "reserved_bytes": int(max(phases) / footprint["filled_share"])
            + footprint["cached_bytes"],
            "outside_bytes": sum(term["bytes"] for term in footprint["outside"]),
        },
    }


def answer(words: list[str]) -> dict[str, Any]:
    """The one cell that ``highwater`` answers."""
    command = [sys.executable, "-m", "highwater", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    (cell,) = json.loads(done.stdout)["cells"]
    return cell


def measured(
    asked: list[tuple[Case, int | None]], *, gpus: int
) -> Iterable[tuple[str, dict[str, Any]]]:
    """Each case's report, or how it ended; those that take most GPUs begin, each on GPUs that
    nobody else has.
    """
    waiting = sorted(asked, key=lambda each: -each[0].gpus)
    free, going = set(range(gpus)), []
    while waiting or going:
        for each in [each for each in waiting if each[0].gpus <= len(free)]:
            if each[0].gpus <= len(free):
                mine = [free.pop() for _ in range(each[0].gpus)]
                waiting.remove(each)
                folder = Path(mkdtemp())
                ranks = started(*each, mine, folder)
                going.append((*each, mine, folder, ranks, time.monotonic()))
        time.sleep(0.2)
        for one in list(going):
            case, budget, mine, folder, ranks, began = one
            late = time.monotonic() - began > LONGEST_S
            if late or any(rank.poll() for rank in ranks):
                for rank in ranks:
                    rank.kill()
            if all(rank.poll() is not None for rank in ranks):
                going.remove(one)
                free.update(mine)
                name = case.name if budget is None else f"edge of {case.name}"
                found = report(ranks, folder, late=late)
                yield name, found | {"wall_s": time.monotonic() - began}
                shutil.rmtree(folder)


def started(
    case: Case, budget: int | None, gpus: list[int], folder: Path
) -> list[subprocess.Popen[bytes]]:
    """Its ranks, which meet through a file in a folder that has their logs, too."""
    found = []
    for rank in range(case.gpus):
        environment = {
            **os.environ,
            **EXPANDABLE,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "HF_HUB_OFFLINE": "1",
            "BUDGET_BYTES": str(budget or 0),
        }
        if case.gpus > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(case.gpus),
                "MEET_AT": str(folder / "meet"),
                "MASTER_ADDR": "127.0.0.1",  # they are asked for, and nothing is opened
                "MASTER_PORT": "29500",
            }
        command = [sys.executable, str(Path(__file__).resolve()), "--run", json.dumps(case)]
        with (folder / f"{rank}.log").open("w") as log:
            found.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return found


def report(ranks: list[subprocess.Popen[bytes]], folder: Path, *, late: bool) -> dict[str, Any]:
    """The fullest rank's report, or the end of the log of the one that failed."""
    logs = [(folder / f"{rank}.log").read_text() for rank in range(len(ranks))]
    if any(rank.returncode for rank in ranks):
        ran_out = any("OutOfMemoryError" in log for log in logs)
        worst = next((log for log in logs if "OutOfMemoryError" in log), logs[0])
        return {"outcome": "oom" if ran_out else "late" if late else "failed", "log": worst[-1500:]}
    reports = [
        json.loads(line)
        for log in logs
        for line in log.splitlines()
        if line.startswith('{"outcome"')
    ]
    return max(reports, key=lambda each: each["allocated_bytes"])


def train(case: Case) -> None:
    """Train two steps by Trainer, and print a line of JSON."""
    from importlib.metadata import version
    from tempfile import TemporaryDirectory

    import torch
    from hf_trainer import RandomDocuments
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from highwater.engine.models.build import read_config
    from highwater.model.model import load_model

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if case.gpus > 1:
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{os.environ['MEET_AT']}",
            rank=int(os.environ["RANK"]),
            world_size=case.gpus,
        )
    budget = int(os.environ.get("BUDGET_BYTES", "0"))

    def bound() -> None:
        if on_gpu and budget:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.mem_get_info()[1])

    if not case.zero:  # which shares a model that was whole on a GPU
        bound()
    directory = load_model(case.model).directory
    config = read_config(directory, length_tokens=case.length_tokens, rope="auto")
    config.use_cache = False
    is_narrow = case.lora is not None or case.narrow
    with torch.device("cuda" if on_gpu else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if is_narrow else torch.float32,
            attn_implementation="sdpa",
        )
    if case.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=case.lora,
            lora_alpha=2 * case.lora,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, adapters)

    class FromTheSecondStep(TrainerCallback):
        """The peak is the second step's, with all states of the optimizer."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu and not self.begun:
                bound()
                torch.cuda.reset_peak_memory_stats()
            self.begun = True

        begun = False

    with TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=2,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=case.micro_batches,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"offload": case.offload},
            use_liger_kernel=case.liger,
            fsdp=case.gpus > 1 and case.sharded and not case.zero,
            deepspeed=zero_config(case) if case.zero else None,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        documents = RandomDocuments(
            documents=2 * case.micro_batches * case.gpus,
            tokens=case.length_tokens,
            vocab_size=config.get_text_config().vocab_size,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=documents,
            callbacks=[FromTheSecondStep()],
        )
        del model
        trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    found = {
        "outcome": "fit",
        "losses": losses,
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "gpu": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {
            name: version(name)
            for name in ("torch", "transformers", "accelerate", "peft", "liger-kernel")
            + ("deepspeed",) * bool(case.zero)
        },
    }
    print(json.dumps(found), flush=True)


def zero_config(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration, as the templates of LLaMA-Factory and transformers have it."""
    on_host = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {
        "stage": int(case.zero[4]),
        "overlap_comm": case.zero.startswith("zero3"),
        "reduce_bucket_size": case.bucket or "auto",
    }
    if "offload" in case.zero:
        zero["offload_optimizer"] = on_host
    if case.zero == "zero3-offload":
        zero["offload_param"] = on_host
    if case.zero.startswith("zero3"):
        numbers = ("prefetch_bucket_size", "param_persistence_threshold")
        zero |= {f"stage3_{name}": "auto" for name in numbers}
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
    }


def table(rows: dict[str, Any]) -> str:
    """Predicted beside measured, in Markdown."""
    lines = [
        "| case | allocated: measured | closed form | trace | reserved: measured | closed form "
        "| trace |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in rows.items():
        said, found = row["predicted"], row.get("measured", {"outcome": "not run"})
        if "predicted_to_fit" in row:
            continue
        cells = []
        for kind in ("allocated", "reserved"):
            real = found.get(f"{kind}_bytes")
            cells.append(f"{real / GIB:.2f} GiB" if real else found["outcome"])
            for by in ("", "trace_"):
                bytes_ = said.get(f"{by}{kind}_bytes")
                off = f", {bytes_ / real - 1:+.1%}" if real and bytes_ else ""
                cells.append(f"{bytes_ / GIB:.2f}{off}" if bytes_ else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| edge | room | predicted | measured |", "| --- | ---: | --- | --- |"]
    for name, row in rows.items():
        if "predicted_to_fit" in row:
            says = "fits" if row["predicted_to_fit"] else "runs out"
            found = row.get("measured", {"outcome": "not run"})["outcome"]
            found = {"fit": "fits", "oom": "runs out"}.get(found, found)
            room = f"{row['budget_bytes'] / GIB:.2f} GiB"
            lines.append(f"| {name.removeprefix('edge of ')} | {room} | {says} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
