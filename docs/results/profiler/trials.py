"""Trials of one GPU within 20 GiB, and what they and their snapshots say, for ``record.py``."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from highwater.memory.snapshot.memory_profile import memory_profile
from highwater.model.model import load_model
from highwater.nouns.environment import Profiling
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialResult, TrialSpec
from highwater.pages.study_commands import request_line, sizes_of
from highwater.store.logs import snapshot_folder
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.local import LocalRunner
from highwater.units import GIB

MODEL = "Qwen3-0.6B"
FITS_TOKENS, RUNS_OUT_TOKENS = 8192, 65_536
BUDGET_BYTES = 20 * GIB
TRIAL_S = 120
"""Seconds that a trial may take."""
CHUNKED = Settings(loss="chunked")
Found = dict[str, Any]


def spec_of(length_tokens: int, settings: Settings, **others: Any) -> TrialSpec:
    """A trial of one GPU, within 20 GiB if no other budget is named."""
    model = load_model(MODEL)
    whole: Found = {
        "model_name": model.name,
        "model_directory": model.directory,
        "config_digest": model.config_digest,
        "device": "cuda",
        "layout": Layout(),
        "settings": settings,
        "length_tokens": length_tokens,
        "memory_budget_bytes": BUDGET_BYTES,
    }
    return TrialSpec(**(whole | others))


def that_run_out() -> Iterator[tuple[str, TrialSpec]]:
    """Trials that run out, each with the most of another thing, or in another place."""
    k = 1024
    yield "logits", spec_of(64 * k, Settings())
    yield "layers", spec_of(256 * k, CHUNKED)
    yield "backward of a layer", spec_of(144 * k, CHUNKED)
    yield "kept activations", spec_of(64 * k, Settings(loss="chunked", recompute="none"))
    kept = Settings(loss="chunked", recompute="all-but-attention")
    yield "kept attention", spec_of(256 * k, kept)
    yield "FSDP1", spec_of(64 * k, Settings(strategy="fsdp"))
    yield "expandable segments", spec_of(64 * k, Settings(allocator="expandable"))
    yield "offload", spec_of(512 * k, Settings(loss="chunked", offload=True))
    alone = Settings(loss="chunked", accumulates=False)
    yield "one micro-batch", spec_of(256 * k, alone, micro_batches=1)
    yield "grpo", spec_of(256 * k, Settings(loss="chunked", objective="grpo"))
    dpo = Settings(loss="chunked", objective="dpo", sequences_per_micro_batch=2)
    yield "dpo", spec_of(128 * k, dpo)
    critic = Settings(loss="chunked", objective="ppo", critic=True)
    yield "ppo with a critic", spec_of(256 * k, critic, memory_budget_bytes=2 * BUDGET_BYTES)


def run(
    spec: TrialSpec, target: Path | None = None, profiling: Profiling | None = None
) -> TrialResult:
    """Run a trial, and keep in ``target`` the snapshots that it recorded."""
    with tempfile.TemporaryDirectory() as folder:
        runner = LocalRunner(
            EngineLauncher(log_directory=Path(folder), timeout_s=TRIAL_S, profiling=profiling)
        )
        result = runner.run(spec)
        log = Path(str(result.log_path))
        if not result.outcome.tells:
            print(log.read_text(encoding="utf-8", errors="replace")[-4000:], flush=True)
        if target is not None:
            shutil.copytree(snapshot_folder(log), target)
    return msgspec.structs.replace(result, log_path=None)


def trial_row(spec: TrialSpec, result: TrialResult) -> Found:
    """What a trial says: its end, the line of the rank that ran out, what was alive."""
    first = result.first_failed
    failure = None if first is None else first.failure
    alive = None if failure is None else failure.alive
    row: Found = {
        "length_tokens": spec.length_tokens,
        "settings": spec.settings.label,
        "objective": spec.settings.objective,
        "outcome": result.outcome,
        "result": msgspec.to_builtins(result),
    }
    if alive is None:
        return row
    sizes = sizes_of(alive)
    return {
        **row,
        "line": request_line(result, spec.settings, spec.layout),
        "by_category_bytes": sizes,
        "is_whole": sum(sizes.values()) == alive.allocated_bytes,
        **_nameless(sizes["unattributed"], alive.allocated_bytes or 0),
    }


def snapshot_row(path: Path) -> Found:
    """What a snapshot says."""
    profile = memory_profile(path)
    return {
        "file": path.name,
        "file_bytes": path.stat().st_size,
        "moment": profile.moment,
        "phase": profile.phase,
        "events": profile.events,
        "requested_bytes": profile.requested_bytes,
        "free_bytes": profile.free_bytes,
        "by_category_bytes": {each.category: each.bytes for each in profile.categories},
        "largest_places": msgspec.to_builtins(profile.places[:8]),
        **_nameless(profile.bytes_of("unattributed"), profile.allocated_bytes),
    }


def _nameless(size: int, allocated: int) -> Found:
    """How much of what was allocated has no name."""
    return {
        "allocated_bytes": allocated,
        "unattributed_bytes": size,
        "unattributed_share": size / allocated if allocated else None,
    }
