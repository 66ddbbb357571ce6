"""``highwater recommend``: the simplest settings that train a length on some GPUs, and what the
next would buy.
"""

import argparse
import shlex

from highwater.cli import console
from highwater.cli.flags import named_model, typed_limits, typed_values, words_again
from highwater.cli.predict import is_tried
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO, UsageError
from highwater.nouns.recommendation import Recommendation
from highwater.nouns.request import request_from, trial_flags
from highwater.nouns.trainer import foreign_name, predicted_traits
from highwater.pages.recommendation_tables import recommendation_tables, rung_list
from highwater.pages.sentence import assumed_host, recommendation_answer
from highwater.recommendation.recommend import recommend as recommended

EXAMPLE = "highwater recommend Qwen3-8B --gpus 4xH20-96GB --length 64k"

_OTHER_TRAININGS = {"--optimizer", "--lora"}
"""Flags after which something else is learned."""


def recommend(arguments: argparse.Namespace) -> int:
    """Print what to take; with ``--list`` all settings that fit."""
    found = found_for(arguments)
    is_bound = any(each.lacks_of == "host" for each in found.candidates)
    host = assumed_host(found.host_memory_bytes, found.usual_host) if is_bound else ()
    console.notes((*found.notes, *host))
    if arguments.json:
        console.answer_json(found)
    else:
        console.answer(f"{recommendation_answer(found)}\n")
        is_explained = arguments.explain
        is_listed = arguments.list_ and found.chosen and predicted_traits(found.trainer)
        tables = (
            (rung_list(found, is_explained=is_explained),)
            if is_listed
            else recommendation_tables(found, is_explained=is_explained)
        )
        for number, table in enumerate(tables):
            if number:
                console.answer("")
            console.answer_table(table)
        console.next_command(_next(arguments, found))
    return EXIT_ANSWERED if found.chosen else EXIT_ANSWERED_NO


def found_for(arguments: argparse.Namespace) -> Recommendation:
    """The recommendation that was asked for."""
    model, settings = named_model(arguments, arguments.studies, example=EXAMPLE)
    if arguments.length is None:
        raise UsageError(
            "no length is named", hint=f"add one, for example `--length 64k`: `{EXAMPLE}`"
        )
    request_from({"model": model, **settings})  # raises for a value that cannot be, as a flag
    return recommended(
        model,
        length=arguments.length,
        gpus=arguments.cluster,
        rollout_gpus=arguments.rollout_gpus,
        trainer=arguments.predicted_for,
        studies=arguments.studies,
        **typed_limits(arguments),
        **settings,
    )


def _next(arguments: argparse.Namespace, found: Recommendation) -> str:
    """The next command: one trial of what is recommended, or its configuration, or of several
    machines the list, or after ``--list`` the recommendation itself; where nothing fits that of
    ``_next_without_any``.
    """
    model = str(typed_values(arguments)["model"])
    trainer = predicted_traits(found.trainer)
    if trainer is None:  # the study has the command that trained so
        return shlex.join(("highwater", "report", found.candidates[0].found_in))
    if found.chosen is None:
        return _next_without_any(arguments, found, model)
    foreign = foreign_name(found.trainer)
    has_trial = is_tried(found.chosen.cell, found.device_name, foreign)
    if not has_trial and not arguments.list_:
        return shlex.join(("highwater", "recommend", model, *words_again(arguments), "--list"))
    if trainer.is_run and not arguments.list_:
        return shlex.join(
            (
                *("highwater", "try", model),
                *trial_flags(found.chosen.cell, found.length_tokens, foreign),
            )
        )
    if trainer.targets and not arguments.list_:
        words = words_again(arguments, drop=("--trainer",))
        return shlex.join(("highwater", "emit", "--for", trainer.targets[0], model, *words))
    return shlex.join(("highwater", "recommend", model, *words_again(arguments)))


def _next_without_any(arguments: argparse.Namespace, found: Recommendation, model: str) -> str:
    """The next command where nothing fits: a recommendation by the first alternative that can be
    typed, one that wants no other GPU and no other optimizer before any; else the prediction of
    every rung.
    """
    typed = [each for each in found.alternatives if each.flags or each.without]
    here = [
        each
        for each in typed
        if each.kind == "technique" and _OTHER_TRAININGS.isdisjoint(each.flags)
    ]
    alternative = next(iter((*here, *typed)), None)
    if alternative is None:
        drop = ("--length", "--rollout-gpus", "--study")
        is_rollout = bool(found.rollout_gpus and arguments.cluster)
        own = {"--gpus": f"{found.gpus}x{found.device_name}"} if is_rollout else {}
        words = words_again(arguments, drop=drop, **own)
        return shlex.join(("highwater", "predict", model, *words))
    flags = dict(zip(alternative.flags[::2], alternative.flags[1::2], strict=True))
    words = words_again(arguments, drop=alternative.without, **flags)
    return shlex.join(("highwater", "recommend", model, *words))
