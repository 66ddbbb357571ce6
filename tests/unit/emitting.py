"""What is asked of a trainer's configuration, and what its own package has names for."""

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from typing import Any

from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.trainer import OURS
from highwater.recommendation.recommend import recommend
from highwater.trainers import accelerate, areal, axolotl, llamafactory, ms_swift, torchtitan, verl
from highwater.trainers import trinity as trinity
from highwater.trainers.emitted import Emitted
from highwater.trainers.targets import TARGETS
from highwater.trainers.trl import words as trl
from places import DATA

FILES = {
    "trinity": trinity, "verl": verl, "areal": areal, "trl": trl, "torchtitan": torchtitan,
    "accelerate": accelerate, "axolotl": axolotl, "llamafactory": llamafactory,
    "ms-swift": ms_swift,
}  # fmt: skip
"""Each target's file, of which VERSION is of the package that it was recorded from."""
OF_OURS = ("trl", "accelerate", "axolotl", "llamafactory", "ms-swift")
"""Targets whose configurations are of our engine's recommendations here."""
_LISTS = ("ulysses", "ring", "copies")
_KINDS = {
    "int": (int,),
    "PositiveInt": (int,),
    "bool": (bool,),
    "float": (float,),
    "any": (int, bool, float, str),
    **dict.fromkeys(("str", "SyncMethod", "OptimizerNames", "AttentionFunction"), (str,)),
    **dict.fromkeys(("QuantizationMethod", "ComputeEnvironment", "DistributedType"), (str,)),
}


def recorded(package: str, version: str) -> dict[str, str]:
    """Each setting's type, by its name, as it was recorded from the trainer's package."""
    document = json.loads((DATA / f"settings_{package}.json").read_text())
    assert (document["package"], document["version"]) == (package, version), (
        "`record_trainers.py` renews it"
    )
    assert re.fullmatch("[0-9a-f]{64}", document["sha256"])
    return document["settings"]


def goal(
    target: str = "trl", length: int | str = "128k", **changes
) -> tuple[Recommendation, Candidate]:
    words = {"model": "Qwen3-4B", "length": length, "allocator": "expandable"}
    words["trainer"] = OURS if target in OF_OURS else TARGETS[target].predicted_for
    words["gpus"] = "4xH200-141GB"
    if target == "areal":
        words |= {"rollout_gpus": 2, "gpus": "6xH200-141GB"}
    found = recommended(json.dumps(words | changes))
    assert found.chosen is not None
    return found, found.chosen


@cache
def recommended(words: str) -> Recommendation:
    """Asked once: a recommendation for Trinity-RFT's trainer takes seconds."""
    return recommend(**json.loads(words))


def emitted(target: str, **changes) -> Emitted:
    """What is emitted where each GPU has its own sequences, of 16k unless it is said otherwise."""
    return TARGETS[target].emit(*goal(target, **{"length": "16k", "ulysses": [1]} | changes))


def rung(found: Recommendation, *, degree: int, offload: bool = False) -> Candidate:
    usual = [each for each in found.candidates if not each.is_lowered]
    kept = [each for each in usual if each.cell.settings.offload == offload]
    return next(each for each in kept if each.cell.layout.ulysses_degree == degree)


def has_words_for(target: str, name: str, value: object, command: str = "sft") -> bool:
    """Whether the trainer's package has this name, for a value of this type."""
    known = recorded(TARGETS[target].package or target, FILES[target].VERSION)
    parts = name.split(".")
    if parts[0] in ("accelerate_config", "env", "ENV"):
        return True
    whole = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    prefix = f"{command}." if target == "trl" else ""
    found = next(each for each in whole if prefix + each in known)
    kind = known[prefix + found]
    if found != name:
        return re.search("(?i)list|dict|any", kind) is not None
    names = re.findall(r"\w+", kind)
    return any(type(value) in _KINDS.get(each, ()) for each in names) or str(value) in names


def ways(hint: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is asked after each way that a hint names, of flags and values to use or to leave."""
    for verb, way in re.findall(r"(\w*)\s*`(--.+?)`", hint):
        if verb != "and":
            words = dict(asked)
        parts = shlex.split(way)
        for flag, value in zip_longest(parts[::2], parts[1::2]):
            name = flag.removeprefix("--").replace("-", "_")
            if verb == "leave":
                del words[name]
            elif name in _LISTS:
                words[name] = [int(value)]
            else:
                words[name] = int(value) if value.isdigit() else value
        yield dict(words)
