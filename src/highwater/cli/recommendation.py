"""``highwater recommend``: the simplest settings that train a length on some GPUs, and what the next would buy."""

import argparse
import shlex
from collections.abc import Mapping

from highwater.cli import console
from highwater.cli.flags import typed_values, words_of
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO, UsageError
from highwater.recommendation import recommend as recommended
from highwater.report.recommendation import recommendation_tables, rung_list
from highwater.spec.model import STATE_BYTES_PER_PARAMETER
from highwater.spec.recommendation import Recommendation
from highwater.spec.request import request_from, trial_flags

_EXAMPLE = "highwater recommend Qwen3-8B --gpus 4xH20-96GB --length 64k"


def recommend(arguments: argparse.Namespace) -> int:
    """Print what to take; with ``--list`` every rung that fits."""
    found = found_for(arguments)
    console.notes(found.notes)
    if arguments.json:
        console.answer_json(found)
    else:
        tables = (rung_list(found),) if arguments.list_ and found.chosen else recommendation_tables(found)
        for number, table in enumerate(tables):
            if number:
                console.answer("")
            console.answer_table(table)
        console.next_command(_next(arguments, found))
    return EXIT_ANSWERED if found.chosen else EXIT_ANSWERED_NO


def found_for(arguments: argparse.Namespace) -> Recommendation:
    """What was typed, answered."""
    if arguments.model is None and len(arguments.studies) > 1:
        arguments.model = arguments.studies.pop()  # `--study STUDY MODEL`: argparse gives both to the flag
    settings = typed_values(arguments)
    model = settings.pop("model", None)
    if model is None:
        raise UsageError("no model is named", hint=f"name a directory or a catalog model: `{_EXAMPLE}`")
    if arguments.length is None:
        raise UsageError("no length is named", hint=f"add one, for example `--length 64k`: `{_EXAMPLE}`")
    request_from({"model": model, **settings})  # raises for a value that cannot be, in the words of flags
    return recommended(
        str(model),
        length=arguments.length,
        gpus=arguments.cluster,
        rollout_gpus=arguments.rollout_gpus,
        trainer=arguments.trainer,
        studies=arguments.studies,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        reserved=arguments.reserved,
        state_bytes_per_param=arguments.state_bytes_per_param,
        **settings,
    )


def _next(arguments: argparse.Namespace, found: Recommendation) -> str:
    """One trial of what is recommended, or its configuration; where nothing fits, the same for the first remedy to be typed."""
    model = str(typed_values(arguments)["model"])
    if found.chosen is None:
        remedy = next((remedy for remedy in found.remedies if remedy.flags or remedy.without), None)
        if remedy is None:
            drop = ("--length", "--rollout-gpus", "--study")
            own = {"--gpus": f"{found.gpus}x{found.device_name}"} if found.rollout_gpus and arguments.cluster else {}
            return shlex.join(("highwater", "predict", model, *words_again(arguments, drop=drop, **own)))
        flags = dict(zip(remedy.flags[::2], remedy.flags[1::2], strict=True))
        return shlex.join(("highwater", "recommend", model, *words_again(arguments, drop=remedy.without, **flags)))
    if found.trainer == "highwater" and not arguments.list_:
        return shlex.join(("highwater", "try", model, *trial_flags(found.chosen.cell, found.length_tokens)))
    if not arguments.list_:
        words = words_again(arguments, drop=("--trainer",))
        return shlex.join(("highwater", "emit", "--for", "trinity", model, *words))
    return shlex.join(("highwater", "recommend", model, *words_again(arguments)))


def words_again(arguments: argparse.Namespace, *, drop: tuple[str, ...] = (), **changed: str) -> list[str]:
    """What was typed, for a prediction or a recommendation, as flags, with changes."""
    typed: dict[str, object] = {
        "--gpus": arguments.cluster,
        "--length": arguments.length,
        "--rollout-gpus": getattr(arguments, "rollout_gpus", 0) or None,
        "--trainer": None if arguments.trainer == "highwater" else arguments.trainer,
        "--study": getattr(arguments, "studies", ()) or None,
        "--gpu-memory": arguments.gpu_memory,
        "--host-memory": arguments.host_memory,
        "--reserved": None if arguments.reserved == "0" else arguments.reserved,
        "--state-bytes-per-param": _unless(arguments.state_bytes_per_param, STATE_BYTES_PER_PARAMETER),
    }
    settings = {name: value for name, value in typed_values(arguments).items() if name != "model"}
    typed |= {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    kept: Mapping[str, object] = {name: value for name, value in typed.items() if value is not None and name not in drop}
    return words_of({name.removeprefix("--"): value for name, value in ({**kept, **changed}).items()})


def _unless(value: int, default: int) -> int | None:
    return None if value == default else value
