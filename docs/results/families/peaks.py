"""Peaks of families on a GPU: one trial each, beside what the formula and the trial's trace said.

``python docs/results/families/peaks.py [FAMILY...]`` (one GPU of 80 GB or more; half a minute a
family) takes the usual config of each family's class in the installed transformers, with four of
its layers, predicts a step by formula and by trace, runs the trial and writes a JSON line each;
``--table peaks.json`` (no GPU) prints what was written. Peaks are those of the allocator, in bytes
that tensors have.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from transformers import CONFIG_MAPPING

from highwater.errors import HighwaterError
from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.formula.moments import families
from highwater.memory.trace.replay import replay
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.local import LocalRunner
from highwater.trials.traced import CachedTracer
from highwater.units import GIB, MIB, format_bytes

LAYERS = 4
LENGTH = 32_768
BUDGET_BYTES = 72 * GIB
TIMEOUT_S = 180
TRACES_AT_ONCE = 4
SETTINGS = Settings(loss="chunked", allocator="expandable")
KEPT = msgspec.structs.replace(SETTINGS, recompute="all-but-attention")
COMPLETED: dict[str, dict[str, Any]] = {
    "cohere": {"vocab_size": 65_536},
    "cohere2": {"vocab_size": 65_536},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm4_moe": {"n_routed_experts": 16},
    "gpt_oss": {"num_local_experts": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "minimax_m2": {"num_local_experts": 16},
    "seed_oss": {"attention_dropout": 0.0},
}
"""Fields without which a family's usual config is refused, or has no room on one GPU."""


class Peak(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One trial, and what was said of it."""

    family: str
    layers: int
    settings: str
    length_tokens: int
    outcome: str
    formula_bytes: int | None = None
    """The step's peak by the formula."""
    traced_bytes: int | None = None
    measured_bytes: int | None = None
    versions: dict[str, str] = {}
    gpu: str | None = None


def main() -> None:
    """Try every family, or print what was tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=sorted(families()), metavar="FAMILY")
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument(
        "--once", action="store_true", help="only where whole layers are recomputed"
    )
    given = parser.parse_args()
    if given.table:
        print(table(msgspec.json.decode(given.table.read_bytes(), type=list[Peak])))
        return
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(TRACES_AT_ONCE) as pool:
        folder = Path(name)
        expected = [
            pool.submit(predicted, family, settings, folder / family / settings.slug)
            for family in given.families
            for settings in (SETTINGS, KEPT)[: 1 if given.once else 2]
        ]
        for each in expected:
            spec, row = each.result()
            if spec is not None:
                measure(row, spec, folder)
            sys.stdout.buffer.write(msgspec.json.encode(row) + b"\n")
            sys.stdout.flush()


def predicted(family: str, settings: Settings, folder: Path) -> tuple[TrialSpec | None, Peak]:
    """A family's trial, and its peak by formula and trace; no trial where something is in the
    way.
    """
    row = Peak(
        family=family,
        layers=LAYERS,
        settings=settings.slug,
        length_tokens=LENGTH,
        outcome="not tried",
    )
    try:
        spec = trial(family, settings, folder)
        shape = load_model(spec.model_directory).shape
        row.formula_bytes = upper_footprint(
            Step(shape, settings, Layout(), length_tokens=LENGTH)
        ).allocated_bytes
        with CachedTracer(folder / "traces", kernel="cudnn") as tracer:
            log = tracer(spec)
    except (HighwaterError, KeyError, ValueError, TypeError) as error:
        row.outcome = f"not tried: {error}"
        return None, row
    row.traced_bytes = replay(log, allocator=settings.allocator).peak_allocated_bytes
    return spec, row


def measure(row: Peak, spec: TrialSpec, folder: Path) -> None:
    """Run the trial, and write down how it ended."""
    result = LocalRunner(EngineLauncher(log_directory=folder / "logs", timeout_s=TIMEOUT_S)).run(
        spec
    )
    row.outcome = result.outcome.value
    if result.outcome is not Outcome.FIT:
        row.outcome += f": {result.reason}"
        return
    (rank,) = result.ranks
    row.measured_bytes = rank.memory.peak_allocated_bytes
    row.versions, row.gpu = rank.versions, rank.device_name


def trial(family: str, settings: Settings, folder: Path) -> TrialSpec:
    """Of the usual config of the family's class, with fewer layers."""
    config = CONFIG_MAPPING[family](**COMPLETED.get(family, {})).to_dict()
    config["num_hidden_layers"] = LAYERS
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:LAYERS]
    config["max_position_embeddings"] = max(LENGTH, config["max_position_embeddings"])
    directory = folder / family
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    model = load_model(str(directory))
    return TrialSpec(
        model_name=family,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cuda",
        layout=Layout(),
        settings=settings,
        length_tokens=LENGTH,
        memory_budget_bytes=BUDGET_BYTES,
    )


def table(rows: list[Peak]) -> str:
    """A line for each trial, with how far off both predictions were."""
    lines = [
        "| family | recomputed | measured | traced | formula |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda each: (each.family, each.settings == KEPT.slug)):
        recomputed = "all but attention" if row.settings == KEPT.slug else "all"
        start = f"| {row.family} | {recomputed}"
        if row.measured_bytes is not None:
            lines.append(f"{start} | {format_bytes(row.measured_bytes)} | {_off(row)} |")
        elif row.traced_bytes is not None and row.formula_bytes is not None:
            ended = row.outcome.partition(":")[0].replace("_", " ").lower()
            predicted = (format_bytes(n) for n in (row.traced_bytes, row.formula_bytes))
            lines.append(f"{start} | {ended} | {' | '.join(predicted)} |")
    return "\n".join(lines)


def _off(row: Peak) -> str:
    """How far from what was measured: the trace in bytes, the formula relative."""
    assert row.measured_bytes and row.traced_bytes and row.formula_bytes  # noqa: PT018, S101
    traced = row.traced_bytes - row.measured_bytes
    return (
        f"{f'{traced / MIB:+.2f} MiB' if traced else 'to the byte'} | "
        f"{row.formula_bytes / row.measured_bytes - 1:+.3%}"
    )


if __name__ == "__main__":
    main()
