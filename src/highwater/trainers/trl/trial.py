"""A trial as TRL's configuration files: the emitted fields for its settings, the user's own fields,
and the trial's data, steps and output.

A user's field stays unless it sets the length, the batch, how processes share the work, the data,
the steps or the output, which the trial sets. A field that would make a trial prove something else,
or nothing, is refused by name. Source of the names: as in ``trainers/trl/words.py``.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from highwater.errors import UsageError
from highwater.model.model import ModelShape, load_model
from highwater.nouns.corpus import DocumentKind, DocumentOrder, missing_files
from highwater.nouns.environment import ALLOCATOR_VARIABLES
from highwater.nouns.objective import GENERATIONS, Objective, generation_micro_batches
from highwater.nouns.study import Cell
from highwater.nouns.trainer import ForeignTrainer
from highwater.nouns.trial import TrialSpec
from highwater.trainers.accelerate import (
    ENDS,
    FILE,
    ON_THE_CPU,
    SHARDING,
    launched_values,
    over_fsdp,
    refuse_unlaunched,
    sharing_of,
)
from highwater.trainers.emitted import nested
from highwater.trainers.files import DOCUMENTS, FinetunerTrial, FineTuning, TrialPlace, launched
from highwater.trainers.foreign import (
    OUTPUT,
    QUIET,
    TRIAL_FIELDS,
    ForeignCommand,
    HasFlash,
    OwnFile,
    TrialFiles,
    TrialHome,
    fsdp_keys,
    launcher_of,
    mapping_in,
    own_file,
    refuse_no_program,
    told_of,
    write_files,
)
from highwater.trainers.logs import steps_of
from highwater.trainers.trl.words import COMMANDS, VERSION, refuse_untrainable, trl_values

CONFIG = "trl.yaml"
_PROGRAM = "trl"
TRIED: Mapping[Objective, DocumentKind] = {"sft": "text", "grpo": "prompt"}
"""Objectives with trials, and the kind of documents for each."""
PROMPT_TOKENS = 16
"""Tokens of a prompt if all the rest of a sequence is generated."""
_REWARD = "get_soft_overlong_punishment"
"""A reward of TRL's own that reads only the length of a completion."""
_DATA = tuple(TRIAL_FIELDS["trl"])
"""The user's fields on data, which a trial has itself, and on resuming a run."""
_REFUSED: Mapping[str, str] = TRIAL_FIELDS["trl, refused"]
"""Fields that a trial cannot take over from the user, and hints."""
_RECOMPUTED = ("gradient_checkpointing", "activation_checkpointing")
"""The two names that transformers has for recomputation."""
_OF_ADAPTERS = ("use_peft", "lora_", "load_in_", "bnb_", "use_bnb_", "dtype")
"""Prefixes of the fields that LoRA changes."""
_OF_THE_STRATEGY = (*SHARDING, "fsdp_state_dict_type")
"""FSDP's keys that a trial always sets: sharding, and how the model is saved at the end."""
_FROM_A_RECOMMENDATION = ("packing", "packing_strategy", "attn_implementation")
"""Fields that are emitted without a user's configuration; with one, TRL's defaults stand."""


class TrialBatch(NamedTuple):
    """Numbers of sequences in a trial."""

    micro_batches: int
    """Micro-batches of a step; for GRPO, groups of completions decide the number."""
    rows: int
    """Sequences of one micro-batch."""
    groups: int
    """Number of GPUs, or groups of GPUs, that have their own sequences."""

    @property
    def sequences(self) -> int:
        """Sequences of one step, over all GPUs."""
        return self.micro_batches * self.rows * self.groups


def refuse_unwritten(spec: TrialSpec, shape: ModelShape) -> None:
    """Raise UsageError for settings that no configuration of TRL can express."""
    cell = Cell(settings=spec.settings, layout=spec.layout)
    refuse_untrainable(cell, shape, has_ulysses=False)
    if spec.settings.holds_logits:
        raise UsageError(
            f"the losses of TRL {VERSION} are computed in tiles, and never hold whole logits",
            hint="use `--loss chunked`, or leave `--loss` out",
        )
    refuse_unlaunched(spec, name="TRL")


def batch_of(spec: TrialSpec, base: Mapping[str, Any]) -> TrialBatch:
    """The sequences of a trial; GRPO trains on whole groups of completions."""
    rows, layout = spec.settings.sequences_per_micro_batch, spec.layout
    micro_batches = spec.micro_batches
    if COMMANDS[spec.settings.objective].generates:
        micro_batches = generation_micro_batches(rows, layout.gpus, _generations(base))
    return TrialBatch(micro_batches=micro_batches, rows=rows, groups=layout.data_parallel_degree)


def completion_tokens(spec: TrialSpec, base: Mapping[str, Any]) -> int:
    """Tokens that GRPO generates: the user's number, else all but a short prompt. Raises UsageError
    if none are left for a prompt.
    """
    named = base.get("max_completion_length")
    tokens = spec.length_tokens - PROMPT_TOKENS if named is None else int(named)
    if not 0 < tokens < spec.length_tokens:
        raise UsageError(
            f"{tokens} generated tokens of {spec.length_tokens} leave none for a prompt",
            hint=f"use `--start-length {max(tokens, 0) + 2 * PROMPT_TOKENS}`"
            if named is not None
            else f"use `--start-length {2 * PROMPT_TOKENS}`",
        )
    return tokens


def document_tokens(spec: TrialSpec, base: Mapping[str, Any]) -> int:
    """Tokens of each document in the trial's data; for GRPO, only the prompt's."""
    if TRIED[spec.settings.objective] == "prompt":
        return spec.length_tokens - completion_tokens(spec, base)
    return spec.length_tokens


def trial_files(launched: FinetunerTrial, base: OwnFile) -> TrialFiles:
    """TRL's and accelerate's files for a trial, based on the user's. Raises UsageError."""
    for name, hint in _REFUSED.items():
        if base.config.get(name):
            raise UsageError(f"{base.source} has {name}, which a trial cannot take over", hint=hint)
    emitted = nested(_emitted(launched, has_base=bool(base.config)))
    kept = {name: value for name, value in base.config.items() if name not in (*_DATA, *ENDS)}
    own = {name: emitted[name] for name in _named(launched.spec, emitted)} | _own(launched, base)
    if scaled := mapping_in(emitted, "model_init_kwargs"):  # merged with the user's
        own["model_init_kwargs"] = {**mapping_in(base.config, "model_init_kwargs"), **scaled}
    recomputed = next((name for name in _RECOMPUTED if name in kept), None)
    if recomputed is not None and "gradient_checkpointing" in own:
        kept = {name: value for name, value in kept.items() if name not in _RECOMPUTED}
        recomputed = None
    variables = mapping_in(kept, "env").items()  # the user's, but the allocator's is the rung's
    env = {name: str(value) for name, value in variables if name not in ALLOCATOR_VARIABLES}
    config = {**emitted, **kept, **own, "env": env}
    if recomputed == "activation_checkpointing":
        del config["gradient_checkpointing"]
    launcher, said = _launcher(launched, base.launcher)
    if recomputed is not None and kept[recomputed]:  # TRL or FSDP recomputes, not both
        launcher.get("fsdp_config", {})["fsdp_activation_checkpointing"] = False
    others = {**ENDS, **own}
    changed = [name for name, value in base.config.items() if others.get(name, value) != value]
    left = [name for name in base.config if name in _DATA]
    return TrialFiles(
        config={name: value for name, value in config.items() if value not in ({}, None)},
        beside={FILE: launcher},
        notes=(*told_of(base.source, changed, left), *said),
    )


def _named(spec: TrialSpec, emitted: Mapping[str, Any]) -> list[str]:
    """Names of emitted fields that replace the user's: of named settings and shared sequences."""
    settings, names = spec.settings, ["optim"] if spec.settings.optimizer != "adamw" else []
    if spec.layout.context_degree > 1:
        names += ["attn_implementation", "packing", "pad_to_multiple_of"]
    if "recompute" in settings.named:
        names.append("gradient_checkpointing")
    if settings.lora is not None:
        names += [name for name in emitted if name.startswith(_OF_ADAPTERS)]
    return [name for name in names if name in emitted]


def _emitted(launched: FinetunerTrial, *, has_base: bool) -> dict[str, Any]:
    """The emitted fields of a trial's settings, without those that TRL chooses itself."""
    spec, model = launched.spec, str(launched.place.model_directory)
    training = FineTuning(launched.cell, spec.length_tokens, model, launched.yarn, launched.shape)
    values: dict[str, Any] = trl_values(training)
    is_flash = values["attn_implementation"] == "flash_attention_2"
    if training.sharing == "none" and has_base:
        for name in _FROM_A_RECOMMENDATION:
            values.pop(name, None)
    elif is_flash and not launched.has_flash:
        # One row of one document needs no borders, and several documents need not be packed.
        values |= {"attn_implementation": "sdpa"}
        for name in ("packing", "packing_strategy"):
            values.pop(name, None)
    if spec.device == "cpu":
        values |= {"bf16": False, "use_cpu": True}
        # FSDP, which recomputes otherwise, is used on GPUs only
        values["gradient_checkpointing"] = spec.settings.recompute != "none"
    return values


def _own(launched: FinetunerTrial, base: OwnFile) -> dict[str, Any]:
    """Fields that a trial sets, even if the user's file has them."""
    spec, batch = launched.spec, batch_of(launched.spec, base.config)
    own: dict[str, Any] = {
        "model_name_or_path": str(launched.place.model_directory),
        "datasets": [{"path": "json", "data_files": str(launched.place.folder / DOCUMENTS)}],
        "per_device_train_batch_size": batch.rows,
        "gradient_accumulation_steps": batch.micro_batches,
        "max_steps": spec.steps,
        "output_dir": str(launched.place.output),
        "accelerate_config": str(launched.place.folder / FILE),
        "use_cpu": spec.device == "cpu",
        **ENDS,
    }
    if COMMANDS[spec.settings.objective].generates:
        tokens = completion_tokens(spec, base.config)
        told = mapping_in(base.config, "generation_kwargs")
        own |= {
            "max_completion_length": tokens,
            "generation_kwargs": {**told, "min_new_tokens": tokens},
            "num_generations": _generations(base.config),
            "reward_funcs": [_REWARD],
            "mask_truncated_completions": False,  # all are truncated, to have their length
        }
        return own
    return own | {"max_length": spec.length_tokens}


def _launcher(
    launched: FinetunerTrial, base: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Accelerate's file, based on the user's, and notes. Raises UsageError for conflicts."""
    spec = launched.spec
    if spec.device == "cpu":
        return dict(ON_THE_CPU), ()
    sharing = sharing_of(spec.layout, launched.shape)
    ours: dict[str, Any] = nested(launched_values(launched.cell, sharing))
    ours |= {"main_process_port": 0, "use_cpu": False}  # 0: not the port of a trial beside this one
    theirs, mode = base.get("distributed_type"), ours["distributed_type"]
    if theirs in (None, "NO", "MULTI_GPU", mode):
        if mode == "FSDP":
            ours["fsdp_config"] = over_fsdp(
                fsdp_keys(base), ours["fsdp_config"], spec.settings, ours_always=_OF_THE_STRATEGY
            )
        return {**base, **ours}, ()
    if spec.layout.context_degree > 1:
        raise UsageError(
            f"sequences are shared by {mode}, and your accelerate file has {theirs}",
            hint="leave `accelerate_config` out of your configuration, or use `--ring 1`",
        )
    processes = {name: ours[name] for name in ("num_processes", "num_machines")}
    said = f"states are shared by your accelerate file's {theirs}, not by FSDP"
    return {**base, **processes, "main_process_port": 0}, (said,)


def _generations(base: Mapping[str, Any]) -> int:
    return int(base.get("num_generations") or GENERATIONS)


def prepare(spec: TrialSpec, foreign: ForeignTrainer, home: TrialHome) -> ForeignCommand:
    """Write the files of a trial of TRL and return its command. Raises HighwaterError."""
    check(spec, foreign, home.has_flash)
    folder, base, words = home.folder, own_files(foreign), foreign.command or (_PROGRAM,)
    model = home.prepared(_documents(spec, base, folder))
    place = TrialPlace(model, folder, folder / OUTPUT)
    trial = launched(spec, place, has_flash=home.has_flash(words[0]))
    files = trial_files(trial, base)
    said = (*missing_files(Path(spec.model_directory)).notes, *files.notes)
    write_files({CONFIG: files.config, **files.beside}, said, folder)
    step_tokens = batch_of(spec, base.config).sequences * spec.length_tokens
    subcommand = COMMANDS[spec.settings.objective].name
    return ForeignCommand(
        words=(*words, subcommand, "--config", str(folder / CONFIG)),
        environment={**QUIET, "HF_DATASETS_CACHE": str(folder / "datasets")},
        steps_done=partial(steps_of, step_tokens=step_tokens, shared_by=spec.layout.context_degree),
    )


def check(spec: TrialSpec, foreign: ForeignTrainer, has_flash: HasFlash) -> tuple[str, ...]:
    """Notes on a trial of TRL. Raises HighwaterError if TRL is missing or cannot express it."""
    if spec.settings.objective not in TRIED:
        raise UsageError(
            f"trials of TRL are written for {', '.join(TRIED)}, not for {spec.settings.objective}",
            hint="use `--objective sft`",
        )
    refuse_unwritten(spec, load_model(spec.model_directory).shape)
    base, program = own_files(foreign), (foreign.command or (_PROGRAM,))[0]
    refuse_no_program(program, "TRL", _PROGRAM, _PROGRAM)
    nowhere = TrialPlace(Path("there"), Path("there"), Path("there"))
    files = trial_files(launched(spec, nowhere, has_flash=has_flash(program)), base)
    batch = batch_of(spec, base.config)
    attention = files.config.get("attn_implementation", "what TRL takes by itself")
    said = [*files.notes, f"attention is {attention}"]
    if batch.micro_batches != spec.micro_batches:
        said.append(f"a step has {batch.micro_batches} micro-batches: whole groups of completions")
    if "max_completion_length" in files.config:
        said.append(
            f"each sequence is a prompt and {files.config['max_completion_length']} tokens that "
            "are generated one by one, which takes most of the time: `max_completion_length` in "
            "`--trainer-config` names fewer, and the prompt has the others"
        )
    return tuple(said)


def own_files(foreign: ForeignTrainer) -> OwnFile:
    """The user's configuration of TRL, with accelerate's file that it names. Raises UsageError."""
    own = own_file(foreign, "name the file that `trl sft --config` takes")
    path = foreign.base_config_path
    return own if path is None else own._replace(launcher=launcher_of(own.config, Path(path)))


def _documents(spec: TrialSpec, base: OwnFile, folder: Path) -> DocumentOrder:
    end = base.config.get("eos_token")
    return DocumentOrder(
        path=str(folder / DOCUMENTS),
        kind=TRIED[spec.settings.objective],
        length_tokens=document_tokens(spec, base.config),
        count=spec.steps * batch_of(spec, base.config).sequences,
        end=None if end is None else str(end),
    )
