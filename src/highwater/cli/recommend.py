"""``highwater recommend`` and ``emit``: the simplest settings that train a length on some GPUs,
with the gains of other settings; and these settings as another trainer's configuration, on stdout,
or with ``-o`` in a folder.
"""

import argparse
import shlex
from contextlib import suppress
from pathlib import Path

from highwater.cli import console
from highwater.cli.flags import (
    named_model,
    told_notes,
    trial_limits,
    typed_place,
    typed_values,
    words_again,
)
from highwater.cli.predict import is_tried
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO, HighwaterError, ModelError, UsageError
from highwater.model.model import load_model
from highwater.nouns.objective import TRAITS
from highwater.nouns.plan import other_class
from highwater.nouns.recommendation import Aim, Candidate, Recommendation
from highwater.nouns.request import request_from, trial_flags
from highwater.nouns.trainer import (
    OF_OTHERS,
    OURS,
    REGISTRY,
    TrainerName,
    foreign_name,
    is_step_of,
    predicted_traits,
    step_in_words,
    trainer_title,
)
from highwater.pages.prediction_tables import assumed_host, in_lines, recommendation_answer
from highwater.pages.recommendation_tables import (
    check_page,
    recommendation_tables,
    rung_list,
    telling_table,
)
from highwater.recommendation.candidates import trainer_question, trainers_gpus
from highwater.recommendation.recommend import drafted
from highwater.recommendation.recommend import recommend as api_recommend
from highwater.trainers.emitted import Emitted, answered_first, bytes_with_logits, unpredicted
from highwater.trainers.targets import (
    CHECK,
    LAUNCH,
    TARGETS,
    Configured,
    configured_choice,
    launch_script,
    refuse_drafts,
    refuse_no_folder,
    refuse_unknown_settings,
    write_folder,
)
from highwater.trials.probe import gpus_meant
from highwater.units import counted, format_tokens, parse_tokens

EXAMPLE = "highwater recommend Qwen3-8B --gpus 4xH20-96GB --length 64k"

_OTHER_TRAININGS = {"--optimizer", "--lora"}
"""Flags that change what is learned."""


def recommend(arguments: argparse.Namespace) -> int:
    """Print the recommended settings; with ``--list`` all settings that fit."""
    found = found_for(arguments)
    is_bound = any(each.lacks_of == "host" for each in found.candidates)
    host = assumed_host(found.host_memory_bytes, found.usual_host) if is_bound else ()
    notes = (*told_notes(arguments, found.notes), *host)
    code = EXIT_ANSWERED if found.chosen else EXIT_ANSWERED_NO
    if arguments.json:
        return console.answer_json(found, code, noted=notes)
    if arguments.list_ and found.chosen and predicted_traits(found.trainer):
        tables = [rung_list(found, is_explained=arguments.explain)]
    elif arguments.explain:
        tables = recommendation_tables(found, is_explained=True)
    else:
        tables = [telling_table(found)]
    console.answer_page(in_lines(recommendation_answer(found)), *tables, noted=notes)
    console.next_command(_next(arguments, found))
    return code


def found_for(arguments: argparse.Namespace) -> Recommendation:
    """The recommendation that the typed words ask for."""
    model, settings = named_model(arguments, arguments.studies, example=EXAMPLE)
    if arguments.length is None and "trainer_config" not in settings:
        whole = shlex.join((*arguments.command_line, "--length", "32k"))
        raise UsageError("no length is named", hint=f"use `{whole}`")
    request_from({"model": model, **settings})  # refuses values by the names of their flags
    typed = vars(arguments)
    aims: list[Aim] = [aim for aim in ("fastest", "lightest") if typed.get(aim)]
    if len(aims) > 1:
        raise UsageError("the fastest and the lightest are two", hint="leave `--lightest` out")
    return api_recommend(
        model,
        length=arguments.length,
        studies=arguments.studies,
        aim=aims[0] if aims else "simplest",
        **typed_place(arguments),
        **settings,
    )


def _next(arguments: argparse.Namespace, found: Recommendation) -> str:
    """The next command: a trial of the recommended settings, its configuration, or another."""
    model = str(typed_values(arguments)["model"])
    trainer = predicted_traits(found.trainer)
    if trainer is None:  # the study has the command that trained so
        return shlex.join(("highwater", "report", found.candidates[0].found_in))
    if found.chosen is None:
        return _next_without_any(arguments, found, model)
    foreign = foreign_name(found.trainer)
    typed = vars(arguments)  # no user's file is written again, and none with these settings
    is_own = "trainer_config" not in typed and not any(typed.get(name) for name in OF_OTHERS)
    is_alone = is_own and found.rollout is None  # no trial runs a rollout
    has_trial = is_alone and is_tried(found.chosen.cell, found.device_name, foreign)
    is_emitted = is_own and trainer.targets and not found.chosen.cell.layout.is_several_machines
    is_emitted = is_emitted and (is_alone or "rollout" in TARGETS[trainer.targets[0]].knows)
    if not has_trial and not is_emitted and not arguments.list_:
        return shlex.join(("highwater", "recommend", model, *words_again(arguments), "--list"))
    if trainer.is_run and has_trial and not arguments.list_:
        flags = trial_flags(found.chosen.cell, found.length_tokens, foreign)
        return shlex.join(("highwater", "try", model, *flags, *trial_limits(arguments)))
    if is_emitted and not arguments.list_:
        unknown = ["--prompt-tokens"] * ("prompt_tokens" not in TARGETS[trainer.targets[0]].knows)
        words = words_again(arguments, drop=("--trainer", *unknown))
        return shlex.join(("highwater", "emit", "--for", trainer.targets[0], model, *words))
    return shlex.join(("highwater", "recommend", model, *words_again(arguments)))


def _next_without_any(arguments: argparse.Namespace, found: Recommendation, model: str) -> str:
    """The next command if nothing fits: ``recommend`` with the flags of an alternative, preferably
    with the same GPUs and training; without one, the prediction of every rung.
    """
    typed = [each for each in found.alternatives if each.flags or each.without]
    here = (each for each in typed if each.kind == "technique")
    here = [each for each in here if _OTHER_TRAININGS.isdisjoint(each.flags)]
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


_ROOMIER = "5GiB"
"""Memory of a GPU to keep free in the second attempt, after another trainer ran out of it."""


def emit(arguments: argparse.Namespace) -> int:
    """Print a trainer's configuration, or write its folder and print the paths. If nothing fits,
    there is no configuration, and ``--json`` prints the recommendation.
    """
    row = TARGETS[arguments.for_]
    model, settings = named_model(arguments, arguments.studies, example=EXAMPLE)
    _refuse_other_class(arguments, model)
    arguments.predicted_for = _predicting_trainer(arguments, model, settings)
    is_predicted = is_step_of(arguments.predicted_for, arguments.for_)
    typed = vars(arguments)
    objective = typed.get("objective") or "sft"
    has_logits = objective in TRAITS and not TRAITS[objective].gives_scalars
    if not is_predicted and "loss" in row.knows and has_logits:
        # whole logits take five times as much there as here
        typed.setdefault("loss", None if typed.get("entropy") == "chunked" else "chunked")
    model, settings = named_model(arguments, arguments.studies, example=EXAMPLE)
    refuse_unknown_settings(arguments.for_, settings, arguments.predicted_for)
    if arguments.output is not None:
        if not arguments.output:
            raise UsageError("a folder without a name", hint="use `-o emitted`")
        refuse_no_folder(Path(arguments.output))
    draft = None  # settings that the trainer does not have are refused before any prediction
    with suppress(HighwaterError):
        length = arguments.length or ""
        draft = drafted(model, length=length, **typed_place(arguments), **settings)
    if draft is not None:
        refuse_drafts(arguments.for_, draft, model=model)
    found = found_for(arguments)
    offloads = found.chosen is not None and found.chosen.cell.settings.uses_host
    host = assumed_host(found.host_memory_bytes, found.usual_host) if offloads else ()
    console.notes((*told_notes(arguments, found.notes), *host))
    again = ("highwater", "recommend", arguments.model, *words_again(arguments))
    made = configured_choice(
        arguments.for_, found, model=arguments.model, is_filled_in=arguments.output is not None
    )
    if made is None:
        return _say_nothing(arguments, found, shlex.join(again))
    chosen, emitted = made
    title = trainer_title(arguments.for_)
    answer = unpredicted(found, chosen, name=title, logits_bytes=emitted.logits_bytes)
    if is_predicted:
        of_it = found.replace(chosen=chosen)
        answer = recommendation_answer(of_it, arguments.for_)
        emitted = answered_first(emitted, answer)
    if emitted.fits is False:  # the trainer's logits are larger than a GPU
        if arguments.json:
            return console.answer_json(emitted, EXIT_ANSWERED_NO)
        shorter = _shorter(arguments, found, made)
        if shorter is not None:
            answer += f" {format_tokens(shorter)} tokens would fit by the same sum."
            again = ("highwater", "emit", "--for", arguments.for_, arguments.model)
            again += tuple(
                words_again(arguments, drop=("--trainer",), **{"--length": str(shorter)})
            )
        console.answer(answer)
        console.next_command(shlex.join(again))
        return EXIT_ANSWERED_NO
    paths = () if arguments.output is None else _write(arguments, found, chosen, emitted, answer)
    if arguments.json:
        return console.answer_json(emitted)
    if paths:
        console.answer_exactly("\n".join(map(str, paths)))
        (check,) = (path for path in paths if path.name == CHECK)
        console.next_command(shlex.join(("cat", str(check))))
    else:
        console.answer_exactly(emitted.alone)
        console.next_command(shlex.join((*again, "--list")))
    return EXIT_ANSWERED


def _shorter(arguments: argparse.Namespace, found: Recommendation, made: Configured) -> int | None:
    """A shorter length, a multiple of 1,024 tokens, whose whole logits fit; None if none does."""
    tokens, room_bytes = found.length_tokens, found.device_bytes - found.reserved_bytes
    while made.emitted.fits is False:
        needed_bytes = bytes_with_logits(found, made.candidate, made.emitted.logits_bytes or 0)
        tokens = (tokens - 1) * room_bytes // needed_bytes // 1024 * 1024
        if tokens < 1024:
            return None
        found = found_for(argparse.Namespace(**vars(arguments) | {"length": str(tokens)}))
        again = configured_choice(arguments.for_, found, model=arguments.model)
        if again is None:
            return None
        made = again
    return tokens


def _refuse_other_class(arguments: argparse.Namespace, model: str) -> None:
    """Raise UsageError for a model that only our trainer trains, with the command that does."""
    error = None
    with suppress(ModelError):  # a study's model may not be on this machine
        error = other_class(load_model(model), arguments.for_)
    if error is None:
        return
    arguments.predicted_for = OURS
    found = found_for(arguments)
    if found.chosen is None:
        asked = shlex.join(("highwater", "recommend", model, *words_again(arguments)))
        error.hint = f"`{asked}` says what would fit in our own trainer"
    else:
        flags = trial_flags(found.chosen.cell, found.length_tokens)
        data = ("--data", "data.jsonl", "--steps", "100", "--output", "run")
        words = shlex.join(("highwater", "train", model, *flags, *data))
        error.hint = f"our own trainer trains it: `{words}`"
    raise error


def _predicting_trainer(
    arguments: argparse.Namespace, model: str, settings: dict[str, object]
) -> TrainerName:
    """The trainer whose prediction is used: the configuration's own, or this engine for comparison
    if the trainer's memory formula does not cover the settings.
    """
    own = TARGETS[arguments.for_].predicted_for
    may_be_on_host = settings.get("activations") in ("auto", "host")
    if REGISTRY[own].trains_by is None and not may_be_on_host:  # few formulas cover that
        return own
    with suppress(HighwaterError):
        gpus = gpus_meant(arguments.cluster, arguments.gpu_memory)
        where = trainers_gpus(gpus, arguments.rollout_gpus)
        trainer_question(model, where, own, parse_tokens(arguments.length or ""), settings)
        return own
    return OURS


def _say_nothing(arguments: argparse.Namespace, found: Recommendation, again: str) -> int:
    """Print that nothing fits, or nothing that the trainer can express; returns the exit code."""
    title, step_of = trainer_title(arguments.for_), arguments.predicted_for
    which = "nothing fits" if found.chosen is None else f"nothing fits that {title} can be told"
    if not is_step_of(step_of, arguments.for_):
        which = f"not predicted for {title}; with {step_in_words(step_of)} {which}"
    would = "" if found.chosen else f". {recommendation_answer(found)}"
    if arguments.json:
        return console.answer_json(found, EXIT_ANSWERED_NO)
    console.answer(f"{which}: there is nothing to configure{would}")
    console.next_command(again)
    return EXIT_ANSWERED_NO


def _write(
    arguments: argparse.Namespace,
    found: Recommendation,
    chosen: Candidate,
    emitted: Emitted,
    answer: str,
) -> tuple[Path, ...]:
    """Write every file into the named folder; returns their paths."""
    row, folder = TARGETS[arguments.for_], Path(arguments.output)
    title = trainer_title(arguments.for_)
    words = ("highwater", "emit", "--for", arguments.for_, arguments.model)
    again = shlex.join((*words, *words_again(arguments, drop=("--trainer",))))
    more = "--reserved" if emitted.fits is None else "--headroom"
    roomier = words_again(arguments, drop=("--trainer",), **{more: _ROOMIER})
    files = {row.file: emitted.text, **emitted.beside}
    said = [f"{title} {emitted.checked_with}, as `{again}` wrote it"]
    said.append("what is typed after it goes to the trainer")
    files[LAUNCH] = launch_script(emitted, file=row.file, said=said, before=row.before)
    files[CHECK] = check_page(
        found,
        chosen,
        emitted,
        answer=answer,
        name=title,
        package=row.package or arguments.for_,
        yours=row.yours,
        command=again,
        roomier=shlex.join((*words, *roomier, "-o", f"{folder.name}-roomier")),
    )
    paths = write_folder(folder, files)
    console.talk(
        f"{counted(len(paths), 'file')} for {title} in {folder}: read {CHECK} before the first "
        "long run"
    )
    return paths
