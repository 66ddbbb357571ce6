"""Record the names and types of other trainers' settings from their unpacked packages: ``python record_trainers.py FOLDER``.

FOLDER holds what ``pip download --no-deps verl==0.9.1 trinity-rft==0.6.0`` brought, both wheels unzipped into it. Nothing of
theirs is imported: verl's defaults are YAML, Trinity-RFT's are the annotations of its dataclasses.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOTS = (
    "trainer",
    "data",
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Every leaf by its dotted name, and the type of its default."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            is_open = value is None or (isinstance(value, str) and value.startswith("${"))
            found[f"{prefix}{name}"] = "any" if is_open else type(value).__name__
    return found


def verl(folder: Path) -> dict[str, str]:
    tree = yaml.safe_load((folder / "verl" / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text())
    return {name: kind for name, kind in flat(tree).items() if name.startswith(ROOTS) and "profiler" not in name}


def trinity(folder: Path) -> dict[str, str]:
    module = ast.parse((folder / "trinity" / "common" / "config.py").read_text())
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}

    def fields(name: str, prefix: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for item in classes[name].body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                kind = ast.unparse(item.annotation)
                if kind in classes and kind != name:
                    found |= fields(kind, f"{prefix}{item.target.id}.")
                else:
                    found[f"{prefix}{item.target.id}"] = kind
        return found

    kept = ("mode", "model.", "cluster.", "explorer.rollout_model.", "trainer.")
    return {name: kind for name, kind in fields("Config", "").items() if name.startswith(kept)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for package, version, fields in (("verl", "0.9.1", verl(folder)), ("trinity-rft", "0.6.0", trinity(folder))):
        document = {"package": package, "version": version, "settings": fields}
        (HERE / f"settings_{package}.json").write_text(json.dumps(document, indent=1) + "\n")
