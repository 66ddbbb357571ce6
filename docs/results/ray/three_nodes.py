"""Twelve cells on the CPU, searched on one machine and on three nodes of a Ray cluster: the same
answers, and the time that each took. Then on three nodes again, of which one is killed in
mid-trial, and then the search itself, both with -9; it is resumed, and answers the same.

    python docs/results/ray/three_nodes.py --json docs/results/ray/three_nodes.json
    python docs/results/ray/three_nodes.py --killed --json docs/results/ray/three_nodes.json
    python docs/results/ray/three_nodes.py --table docs/results/ray/three_nodes.json

The second measures the last search alone, beside the recorded others.
The nodes are Ray's own simulation, on one machine whose cores they share; each micro-batch of every
trial is late by some seconds, so that the time is one of waiting, as for a GPU. The cells differ in
how the loss, the MLP and the recomputation are done; trials run out of memory for real, under a
limit.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[2] / "tests" / "ray")]

from local_cluster import ON_LOOPBACK, LocalCluster, local_cluster  # noqa: E402
from paced_batches import PACE_S  # noqa: E402

from highwater.nouns.codec import to_builtins  # noqa: E402
from highwater.nouns.plan import plan  # noqa: E402
from highwater.nouns.request import request_from  # noqa: E402
from highwater.nouns.settings import Settings, short_settings  # noqa: E402
from highwater.nouns.study import Cell, Question  # noqa: E402
from highwater.nouns.trial import Runner  # noqa: E402
from highwater.search.scheduler import recorded_search  # noqa: E402
from highwater.store.journal import open_journal, read_study  # noqa: E402
from highwater.trials.engine_trial import EngineLauncher  # noqa: E402
from highwater.trials.inputs import model_files  # noqa: E402
from highwater.trials.local import LocalRunner  # noqa: E402
from highwater.trials.probe import environment, probe  # noqa: E402
from highwater.trials.ray_job import Needs  # noqa: E402
from highwater.trials.ray_runner import RayRunner, choose, cluster_at  # noqa: E402

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 20_000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 512,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
NODES = 3
TIMEOUT_S = 300.0
MEMORY = "560MiB"
RESOLUTION = 512
LONGEST = 2048
DATA = "paced_batches:paced"


def question(folder: Path) -> Question:
    """Twelve cells of one process, held to so much memory that every trial takes seconds."""
    directory = folder / "model"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL))
    named = {"model": str(directory), "device": "cpu", "gpus": [1], "memory": MEMORY}
    lengths = {"start_length": RESOLUTION, "resolution": RESOLUTION, "max_length": LONGEST}
    asked = plan(request_from({**named, **lengths, "data": DATA}, keywords=True), probe()).question
    (layout,) = {cell.layout for cell in asked.cells}
    ways = itertools.product(("full", "chunked"), (1, 2, 4), ("layer", "none"))
    cells = tuple(
        Cell(layout=layout, settings=Settings(loss=loss, mlp_tiles=tiles, recompute=recompute))
        for loss, tiles, recompute in ways
    )
    return msgspec.structs.replace(asked, cells=cells)


def search(folder: Path, name: str, address: str | None) -> None:
    """Search, or go on with a search: on this machine, or on the cluster at an address."""
    asked, logs = question(folder), folder / name
    if address is None:
        runner: Runner = LocalRunner(EngineLauncher(log_directory=logs, timeout_s=TIMEOUT_S))
    else:
        files = model_files(Path(asked.model.directory))
        needs = Needs(on_gpus=False, model=files, data_module="paced_batches")
        cluster = cluster_at(address, needs)
        nodes = choose(cluster.read_nodes(), "cpu", None).nodes
        request = request_from(
            {"model": asked.model.directory, "timeout": TIMEOUT_S}, keywords=True
        )
        runner = RayRunner(cluster, nodes, request, log_directory=logs)
    with open_journal(folder / f"{name}.jsonl", asked) as journal, closing(runner):
        for event in recorded_search(asked, runner, journal):
            print(type(event).__name__, end=" ", flush=True)
    print()


def searching(folder: Path, name: str, address: str | None) -> list[str]:
    """The command of a search in a process of its own."""
    words = [sys.executable, __file__, "--search", name, "--folder", str(folder)]
    return [*words, *([] if address is None else ["--address", address])]


def timed(folder: Path, name: str, address: str | None) -> dict[str, Any]:
    """One whole search."""
    began = time.monotonic()
    subprocess.run(searching(folder, name, address), check=True)
    return answers(folder, name, time.monotonic() - began)


def killed(folder: Path, name: str, cluster: LocalCluster) -> dict[str, Any]:
    """A search of which a node is killed while a trial runs there, then the search; resumed."""
    address = cluster.address
    began = time.monotonic()
    first = subprocess.Popen(searching(folder, name, address))
    study = folder / f"{name}.jsonl"
    wait_for_trials(study, 4)
    while (holder := holder_in_mid_trial(cluster)) is None:
        time.sleep(0.1)
    psutil.Process(holder.ppid()).kill()
    wait_for_trials(study, 10)
    first.kill()
    first.wait()
    subprocess.run(searching(folder, name, address), check=True)
    told = answers(folder, name, time.monotonic() - began)
    lost = [trial for trial in read_study(study).trials if is_lost(trial.result)]
    return {**told, "trials_lost": len(lost)}


def wait_for_trials(study: Path, count: int) -> None:
    """Wait until so many trials have ended, and others run."""
    while not study.exists() or study.read_text().count('"kind":"trial_finished"') < count:
        time.sleep(0.2)


def holder_in_mid_trial(cluster: LocalCluster) -> psutil.Process | None:
    """A process in which Ray holds a trial that has run for a few seconds, and is not near its
    end; None where there is none now.
    """
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            is_holder = "TrialOnNode" in " ".join(process.cmdline())
            ages = [time.time() - child.create_time() for child in process.children()]
            if is_holder and any(2.0 < age < 6.0 for age in ages):
                return process
    return None


def is_lost(result: Any) -> bool:
    """Whether a trial ended because its node was lost."""
    return result is not None and "of the Ray cluster was lost" in result.reason


def answers(folder: Path, name: str, wall_s: float) -> dict[str, Any]:
    """What a search found: for each cell the longest length that fits, and the next, that does
    not.
    """
    study = read_study(folder / f"{name}.jsonl")
    return {
        "name": name,
        "complete": study.complete,
        "wall_s": round(wall_s, 1),
        "trials": sum(trial.result is not None for trial in study.trials),
        "answers": {
            short_settings(answer.cell.settings): [answer.reach_tokens, answer.does_not_fit_tokens]
            for answer in study.answers
        },
    }


def measured(known: dict[str, Any] | None) -> dict[str, Any]:
    """All three searches; beside two that are known the last alone."""
    os.environ.update(ON_LOOPBACK)
    os.environ["PYTHONPATH"] = str(HERE)
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        alone = timed(folder, "one machine", None) if known is None else known["searches"][0]
        with local_cluster(*["1"] * NODES) as cluster:
            if known is None:
                together = timed(folder, "three nodes", cluster.address)
            else:
                together = known["searches"][1]
            broken = killed(folder, "a node and the search killed", cluster)
    return {
        "environment": to_builtins(environment()),
        "pace_s": PACE_S,
        "nodes": NODES,
        "searches": [alone, together, broken],
    }


def table(found: dict[str, Any]) -> str:
    """The answers side by side, and the times."""
    searches = found["searches"]
    head = ["settings", *(each["name"] for each in searches)]
    rows = [
        [settings, *(" / ".join(map(str, each["answers"][settings])) for each in searches)]
        for settings in searches[0]["answers"]
    ]
    rows.append(["trials", *(str(each["trials"]) for each in searches)])
    rows.append(["seconds", *(f"{each['wall_s']:.0f}" for each in searches)])
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    same = all(each["complete"] and each["answers"] == searches[0]["answers"] for each in searches)
    faster = searches[0]["wall_s"] / searches[1]["wall_s"]
    lines += [
        "",
        f"{'The same answers' if same else 'DIFFERENT ANSWERS'}; {found['nodes']} nodes took 1 / "
        f"{faster:.2f} of the time of one machine; {searches[2]['trials_lost']} trials were lost "
        "with a node that was killed, and tried again on another.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Search, or show what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--search")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--address")
    asked = parser.parse_args()
    if asked.search:
        search(asked.folder, asked.search, asked.address)
        return
    known = json.loads(asked.json.read_text()) if asked.killed else None
    found = json.loads(asked.table.read_text()) if asked.table else measured(known)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
