"""Configs of every causal family of transformers and of every catalog model, asked about by every
command: the count against the model that its class builds, and who answers.

``python docs/results/families/front_door.py [FAMILY or NAME...]`` (no GPU; torch on its meta
device). For every family that ``AutoModelForCausalLM`` builds its class's usual config, and every
config of the catalog: each is read, and predicted and recommended for on eight H200s, or it is
refused, by each command, by one sentence that names what stands in the way, and with a way on. A
config that some command answers has its parameters counted against the class's own model.
Writes ``front_door.json`` beside this file, and prints a table.
"""

import io
import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from highwater.cli.app import main as highwater
from highwater.errors import HighwaterError
from highwater.model.model import load_model
from highwater.model.model_place import catalog_model, catalog_names

FILE = Path(__file__).with_name("front_door.json")
MOST_OFF = 2e-4
"""RankShare of its class's parameters that a shape may miss."""
GPUS = ("--gpus", "8xH200-141GB")
COMMANDS: dict[str, tuple[str, ...]] = {
    "predict": GPUS,
    "recommend": (*GPUS, "--length", "2048"),
    "find": ("--device", "cuda", "--memory", "80GiB", "--dry-run", "--max-length", "8k"),
    "try": ("--device", "cuda", "--memory", "80GiB", "--dry-run", "--length", "2048"),
    "emit": ("--for", "trl", *GPUS, "--length", "2048"),
}
FIRST = ("predict", "recommend")
"""Commands that a config which they answer is asked of; a refused one is asked of all."""
COMPLETED: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 32,
        "position_embedding_type": "rope",
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "olmo3": {"max_position_embeddings": 8192},
    "opt": {"max_position_embeddings": 8192},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "seed_oss": {"attention_dropout": 0.0},
}
"""Fields without which a family's usual config is no model that trains, or that no command's
lengths go with."""


class Asked(msgspec.Struct, kw_only=True):
    """One config, and what was said of it."""

    name: str
    family: str
    origin: str
    """Where it is from: the class's usual config, or the catalog."""
    outcome: str
    """``answered``; ``refused`` by every command; ``measured alone``: read and trained, and not
    predicted; or what is wrong."""
    parameters: int | None = None
    class_parameters: int | None = None
    said: str | None = None
    """Why it is refused, and the way on."""


def main() -> None:
    """Ask about every config, write the file, print the table."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    words = sys.argv[1:]
    rows = [
        *(usual(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if _is_asked(name)),
        *(of_catalog(name) for name in catalog_names() if _is_asked(name) and name != "tiny"),
    ]
    if not words:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        document = {"versions": versions, "configs": msgspec.to_builtins(rows)}
        FILE.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(table(rows))
    wrong = [row for row in rows if row.outcome.startswith("wrong")]
    for row in wrong:
        print(f"{row.name}: {row.outcome}")
    sys.exit(bool(wrong))


def table(rows: list[Asked]) -> str:
    """How many configs of each origin have which outcome, and the furthest count."""
    counts = Counter((row.origin, row.outcome) for row in rows)
    off = [
        abs(row.parameters / row.class_parameters - 1)
        for row in rows
        if row.parameters and row.class_parameters
    ]
    lines = [f"{origin}: {outcome}: {count}" for (origin, outcome), count in sorted(counts.items())]
    furthest = f"{max(off):.4%}" if off else "none"
    return "\n".join(
        (*lines, f"{len(rows)} configs; {len(off)} counted, the furthest {furthest} off")
    )


def _is_asked(name: str) -> bool:
    return not sys.argv[1:] or name in sys.argv[1:]


def usual(family: str) -> Asked:
    """The usual config of a family's class."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, family)
        config = None
        try:
            config = CONFIG_MAPPING[family](**COMPLETED.get(family, {}))
            config.save_pretrained(path)
        except Exception:  # noqa: BLE001 (one that is made of several others: its name has to do)
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps({"model_type": family}))
        return asked(family, family, "usual config of its class", path, config)


def of_catalog(name: str) -> Asked:
    """A model of the catalog."""
    found = catalog_model(name)
    assert found is not None  # noqa: S101 (a name of the catalog)
    directory = found[1].directory
    config = AutoConfig.from_pretrained(directory)
    return asked(name, config.model_type, "catalog", directory, config)


def asked(
    name: str, family: str, origin: str, path: Path, config: PreTrainedConfig | None
) -> Asked:
    """What every command says of a config."""
    row = Asked(name=name, family=family, origin=origin, outcome="answered")
    first = {command: run(command, path) for command in FIRST}
    refusals = {text for code, text in first.values() if code == _REFUSED}
    if not refusals:
        if any(code not in _ANSWERED for code, _ in first.values()):
            row.outcome = f"wrong: {first}"
            return row
        return counted(row, path, config)
    if len(refusals) > 1 or any(code != _REFUSED for code, _ in first.values()):
        row.outcome = f"wrong: commands differ: {first}"
        return row
    (row.said,) = refusals
    if "hint:" not in row.said:
        row.outcome = "wrong: refused without a way on"
        return row
    others = {command: run(command, path) for command in COMMANDS if command not in FIRST}
    try:
        load_model(str(path))
    except HighwaterError:
        row.outcome = "refused"
        if {text for _, text in others.values()} != refusals:
            row.outcome = f"wrong: not every command refuses it: {others}"
        return row
    row.outcome = "measured alone" if _UNPREDICTED in row.said else f"wrong: {row.said}"
    return counted(row, path, config)


_UNPREDICTED = "which trains, and whose memory no prediction knows"
_REFUSED = 2
_ANSWERED = (0, 1)
_EXAMPLE = re.compile(r"`highwater \w+ [^`]*`")
"""Each command's hint has an example of its own."""


def run(command: str, path: Path) -> tuple[int, str]:
    """The exit code of a command about a config, and what it said on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(out), redirect_stderr(err):
        words = [command, str(path), *COMMANDS[command]]
        if command in ("find", "try"):
            words += ["--log-dir", folder]
        code = highwater(words)
    return code, _EXAMPLE.sub("`highwater`", err.getvalue().replace(f"{path}/", "")).strip()


def counted(row: Asked, path: Path, config: PreTrainedConfig | None) -> Asked:
    """The row with both counts; wrong where they differ, or where a factor of YaRN is not told."""
    row.parameters = load_model(str(path)).shape.parameters
    if config is None:
        row.outcome = "wrong: answered, and its class builds no model"
        return row
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config.get_text_config(), dtype=torch.bfloat16)
    row.class_parameters = sum(parameter.numel() for parameter in theirs.parameters())
    if abs(row.parameters / row.class_parameters - 1) > MOST_OFF:
        row.outcome = (
            f"wrong: {row.parameters} parameters, and its class has {row.class_parameters}"
        )
    return row


if __name__ == "__main__":
    main()
