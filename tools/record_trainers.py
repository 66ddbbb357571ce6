"""Record the names and types of other trainers' settings from their packages: ``python
record_trainers.py FOLDER``.

FOLDER holds what ``pip download --no-deps`` brought of each package in ``PACKAGES``. Nothing of
theirs is imported: verl's defaults are YAML, accelerate's are the arguments of its launcher, the
others' are the annotations of their dataclasses. What is recorded names the file's sha256, so that
it can be told from which it is.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import yaml

DATA = Path(__file__).parents[1] / "tests" / "data"
ROOTS = (
    "algorithm.",
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


def classes_of(source: str) -> dict[str, ast.ClassDef]:
    """Every class by its name, one within another too: ``RoPE.Config``."""

    def within(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield f"{prefix}{node.name}", node
                yield from within(node.body, f"{prefix}{node.name}.")

    return dict(within(ast.parse(source).body, ""))


def annotated(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> dict[str, str]:
    """The fields of a class and those of its bases, with their annotations."""
    found: dict[str, str] = {}
    for base in node.bases:
        if (name := ast.unparse(base)) in classes:
            found |= annotated(classes[name], classes)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = ast.unparse(item.annotation)
    return found


def nested_fields(name: str, classes: dict[str, ast.ClassDef], prefix: str = "") -> dict[str, str]:
    """The fields of a class by their dotted names, through those whose type is another; of a tuple
    or a list its first.
    """
    found: dict[str, str] = {}
    for field, annotation in annotated(classes[name], classes).items():
        one = annotation.removeprefix("tuple[").removesuffix(", ...]")
        one = one.removeprefix("Optional[List[").removesuffix("]]")
        kind = one.removesuffix(" | None")
        if kind in classes and kind != name:
            found |= nested_fields(kind, classes, f"{prefix}{field}.{'0.' * (one != annotation)}")
        else:
            found[f"{prefix}{field}"] = annotation
    return found


def verl(wheel: ZipFile) -> dict[str, str]:
    tree = yaml.safe_load(wheel.read("verl/trainer/config/_generated_ppo_trainer.yaml"))
    return {
        name: kind
        for name, kind in flat(tree).items()
        if name.startswith(ROOTS) and "profiler" not in name
    }


def trinity(wheel: ZipFile) -> dict[str, str]:
    fields = nested_fields("Config", classes_of(wheel.read("trinity/common/config.py").decode()))
    kept = ("mode", "algorithm.algorithm_type", "model.", "cluster.", "explorer.rollout_model.")
    kept += ("trainer.", "synchronizer.")
    return {name: kind for name, kind in fields.items() if name.startswith(kept)}


def areal(wheel: ZipFile) -> dict[str, str]:
    fields = nested_fields("GRPOConfig", classes_of(wheel.read("areal/api/cli_args.py").decode()))
    left_out = (
        "teacher.",
        "critic.",
        "ref.",
        "vllm.",
        "perf_tracer.",
        "memory_profiler.",
        "actor.megatron.",
        "actor.archon.",
    )
    return {
        name: kind
        for name, kind in fields.items()
        if not name.startswith((*left_out, "eval_gconfig.", "rollout.agent."))
    }


def accelerate(wheel: ZipFile) -> dict[str, str]:
    """Fields of the file, and in its sections the arguments of the launcher that they stand for."""
    cluster = classes_of(wheel.read("accelerate/commands/config/config_args.py").decode())
    found = annotated(cluster["ClusterConfig"], cluster)
    sections = {
        "fsdp_": "fsdp_config",
        "parallelism_config_": "parallelism_config",
        "zero": "deepspeed_config",
    }
    sections |= {"offload_": "deepspeed_config"}
    for node in ast.walk(ast.parse(wheel.read("accelerate/commands/launch.py"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            name = ast.unparse(node.args[0]).strip("'-")
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            is_truth = words.get("default") in ("'true'", "'false'") or name.startswith("zero3_")
            kind = "bool" if is_truth or "action" in words else words.get("type", "str")
            kind = "int" if words.get("choices") == "['1', '2']" else kind
            found |= {
                f"{section}.{name}": kind
                for start, section in sections.items()
                if name.startswith(start)
            }
    return found


def trl(wheel: ZipFile, transformers: ZipFile) -> dict[str, str]:
    """By subcommand: what its parser has, of the trainer's configuration and the model's."""
    source = transformers.read("transformers/training_args.py").decode()
    files = ("base", "sft", "grpo", "reward", "dpo", "model")
    source += "".join(wheel.read(f"trl/trainer/{name}_config.py").decode() for name in files)
    classes = classes_of(source.replace("from __future__ import annotations", ""))
    model = annotated(classes["ModelConfig"], classes)
    commands = {
        "sft": "SFTConfig",
        "grpo": "GRPOConfig",
        "reward": "RewardConfig",
        "dpo": "DPOConfig",
    }
    return {
        f"{command}.{name}": kind
        for command, config in commands.items()
        for name, kind in (annotated(classes[config], classes) | model).items()
        if not name.startswith("_")
    }


def torchtitan(wheel: ZipFile) -> dict[str, str]:
    """Fields of the dataclasses; ``module:name`` for what may be imported; ``flavor:module:name``
    for its own models.
    """
    found: dict[str, str] = {}
    sections = {
        "training": ("config/configs", "TrainingConfig"),
        "parallelism": ("config/configs", "ParallelismConfig"),
    }
    sections |= {
        "rope": ("models/common/rope", "RoPE.Config"),
        "trainer": ("trainer", "Trainer.Config"),
        "lora": ("components/lora", "LoRAConverter.Config"),
    }
    for section, (path, name) in sections.items():
        classes = classes_of(wheel.read(f"torchtitan/{path}.py").decode())
        found |= {
            f"{section}.{field}": kind for field, kind in annotated(classes[name], classes).items()
        }
    backend = "torchtitan.experiments.transformers_modeling_backend"
    modules = (
        "components.lora",
        "components.loss",
        "components.optimizer",
        "config",
        "distributed.activation_checkpoint",
        "trainer",
    )
    modules += ("models.common.config_utils", "models.qwen3", "models.llama3")
    for module in (*(f"torchtitan.{name}" for name in modules), backend, f"{backend}.configs"):
        found |= {
            f"{module}:{name}": "name" for name in _importable(wheel, module.replace(".", "/"))
        }
    for family in ("qwen3", "llama3"):
        tree = ast.parse(wheel.read(f"torchtitan/models/{family}/__init__.py"))
        assigned = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        found |= {
            f"flavor:{family}:{ast.literal_eval(key)}": "flavor"
            for key in assigned[f"{family}_configs"].keys
        }
    return found


def axolotl(wheel: ZipFile) -> dict[str, str]:
    """Fields of its schema by their dotted names, and those of the plugin that brings Liger's
    loss.
    """
    names = ("config", "fsdp", "model", "peft", "training", "deprecated", "enums", "datasets")
    names += ("internal/__init__",)
    source = "".join(wheel.read(f"axolotl/utils/schemas/{name}.py").decode() for name in names)
    source += wheel.read("axolotl/integrations/liger/args.py").decode()
    classes = classes_of(source)
    fsdp = annotated(classes["FSDPConfig"], classes)
    found = annotated(classes["AxolotlInputConfig"], classes)
    found |= annotated(classes["LigerArgs"], classes)
    return found | {f"fsdp_config.{name}": kind for name, kind in fsdp.items()}


def llamafactory(wheel: ZipFile, transformers: ZipFile) -> dict[str, str]:
    """Fields of the classes that its parser is made of."""
    source = transformers.read("transformers/training_args.py").decode()
    names = ("model", "data", "finetuning")
    source += "".join(wheel.read(f"llamafactory/hparams/{name}_args.py").decode() for name in names)
    classes = classes_of(source)
    made_of = ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments")
    return {
        name: kind
        for each in made_of
        for name, kind in annotated(classes[each], classes).items()
        if not name.startswith("_")
    }


def ms_swift(wheel: ZipFile, transformers: ZipFile) -> dict[str, str]:
    """Fields of the class that its parser is made of; ``fsdp_config.*``: keys of the file of FSDP2
    that it brings itself.
    """
    source = transformers.read("transformers/training_args.py").decode()
    names = [f"base_args/{name}_args" for name in ("model", "quant", "template", "data", "base")]
    names += ["tuner_args", "sft_args"]
    source += "".join(wheel.read(f"swift/arguments/{name}.py").decode() for name in names)
    classes = classes_of(source)
    found = annotated(classes["TrainingArguments"], classes)
    found |= annotated(classes["SftArguments"], classes)
    mixin = classes_of(wheel.read("swift/trainers/arguments.py").decode())
    found |= annotated(mixin["TrainArgumentsMixin"], mixin)
    sharding = json.loads(wheel.read("swift/config/fsdp2.json"))["fsdp_config"]
    found |= {f"fsdp_config.{name}": type(each).__name__ for name, each in sharding.items()}
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


def _importable(wheel: ZipFile, path: str) -> Iterator[str]:
    """Names that a module defines or imports."""
    names = wheel.namelist()
    for node in ast.parse(
        wheel.read(f"{path}.py" if f"{path}.py" in names else f"{path}/__init__.py")
    ).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


PACKAGES = {
    "verl": ("0.9.1", verl),
    "trinity-rft": ("0.6.0", trinity),
    "areal": ("1.0.4", areal),
    "accelerate": ("1.15.0", accelerate),
    "trl": ("1.16.0", trl),
    "torchtitan": ("0.3.0", torchtitan),
    "axolotl": ("0.19.0", axolotl),
    "llamafactory": ("0.9.5", llamafactory),
    "ms-swift": ("4.6.0", ms_swift),
}
TRANSFORMERS = {"trl": "5.23.0", "llamafactory": "5.6.0", "ms-swift": "5.19.0"}
"""The version whose TrainingArguments a package's configurations extend."""


def wheel_of(folder: Path, package: str, version: str) -> Path:
    (path,) = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")
    return path


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for package, (version, fields) in PACKAGES.items():
        path = wheel_of(folder, package, version)
        others = (
            [ZipFile(wheel_of(folder, "transformers", TRANSFORMERS[package]))]
            if package in TRANSFORMERS
            else []
        )
        document = {
            "package": package,
            "version": version,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "settings": fields(ZipFile(path), *others),
        }
        (DATA / f"settings_{package}.json").write_text(json.dumps(document, indent=1) + "\n")
