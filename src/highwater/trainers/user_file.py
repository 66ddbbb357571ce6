"""User's file: read the settings that affect memory from a user's own file of a trainer based on
transformers, as fields of a request: ``predict --trainer-config``. Typed settings take precedence;
fields that are not predicted are refused by name; unknown fields are named in a note.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from highwater.errors import UsageError
from highwater.memory.interval.residuals import unfit
from highwater.memory.question import KEPT_REFERENCE, ZERO_NOTE
from highwater.memory.trainers import MEMORY
from highwater.nouns.codec import Record, packaged
from highwater.nouns.environment import ENV_IN_WORDS
from highwater.nouns.foreign_request import base_config, file_content
from highwater.nouns.objective import ALL_LINEAR, TRAITS, RolloutRequest
from highwater.nouns.settings import RUNG_ROWS, Settings, listed
from highwater.nouns.study import Cell, RecordedTrial, Study
from highwater.nouns.trainer import FOREIGN, TRAINERS, TrainerName
from highwater.trainers.foreign import flat_fields, fsdp_keys, launcher_of, mapping_in, yaml_fields

FileFields = Mapping[str, Any]
SAVING = ("allocator", "loss", "liger", "activations", "recompute")
"""Settings in a file that a recommendation chooses itself."""
_CHOSEN = ("ulysses", "token_budget", "offload")
"""Further ones in files that are read by the words of ``emit``."""


class FileWords(Record, frozen=True, kw_only=True):
    """How a trainer's file names what we set: its fields by meaning; empty: it has none."""

    length: str = ""
    rows: str = "per_device_train_batch_size"
    by_tokens: str = ""
    """Field by which tokens of a GPU say how large a micro-batch is; else ``rows`` does."""
    rank: tuple[str, int] = ("", 0)
    """Field of LoRA's rank, and its default."""
    alpha: tuple[str, int | None] = ("lora_alpha", None)
    """Field of LoRA's alpha, and its default; None: twice the rank."""
    targets: str = ""
    adapters: tuple[str, tuple[Any, ...]] = ("", ())
    """Field that asks for adapters, and the values that do; None among them: also if left out."""
    four_bits: tuple[str, tuple[Any, ...]] = ("load_in_4bit", (True,))
    fused: tuple[str, ...] = ("use_liger_kernel",)
    """Fields of Liger's kernels, the loss's last: all have to be true for our chunked loss. A file
    may also name the kernels of layers in ``liger_kernel_config``."""
    fused_by: tuple[str, ...] = ()
    """Lines that load these kernels, to be written beside the fields."""
    keeps_all: tuple[str, ...] = ()
    """Fields that switch recomputation off."""
    recomputes: bool = True
    """True if layers are recomputed by default."""
    on_host: tuple[str, ...] = ()
    """Fields that put layers' activations into host memory."""
    optimizer: str = "optim"
    words: Mapping[str, Any] = MappingProxyType({})
    """All names in order, each with the setting that it has, as text, or its value, if there is
    only one: the trainer's configuration is written by them, and a file is read by them alone."""
    refused: tuple[str, ...] = ()
    """Fields with effects that are not predicted, besides those of every trainer."""
    usual: tuple[str, ...] = ()
    """Their values that have no such effect, besides those of every trainer."""
    passed: tuple[str, ...] = ()
    """Fields without an effect on memory, besides those of every trainer; ``*``: any end."""


class _AllWords(Record, frozen=True, kw_only=True):
    """Meanings of fields in users' files, from ``user_file.json``."""

    trainers: dict[TrainerName, FileWords]
    refused: tuple[str, ...]
    """Fields of any trainer with effects that are not predicted."""
    eager: dict[str, str]
    """Fields of any trainer with the value that is refused: attention that holds its scores."""
    known: tuple[str, ...]
    """Fields of any trainer that are read, or have no effect on memory; ``*``: any end."""


_ALL = packaged("trainers/user_file.json", _AllWords)
FILE_WORDS: Mapping[TrainerName, FileWords] = _ALL.trainers
_USUAL = (1, -1, "none", "sft")
"""Values of refused fields that have no such effect."""
_OPTIMIZERS = {
    "adamw-8bit": r"(paged_)?adamw_(torch_|bnb_)?8bit",
    "adamw": r"adamw(_torch\w*)?|paged_adamw(_32bit)?",
}
"""Patterns of optimizers' names in files, by the optimizer that is predicted for them."""
_THEIRS = {
    "recompute": "gradient_checkpointing",
    "offload": "offload_params",
    "activations": "offload of activations",
}
"""Names in files of settings that some trainers' formulas lack, if they differ from ours."""


class FileSettings(NamedTuple):
    """What a user's file says: settings, a length, and notes on what was not read."""

    settings: dict[str, Any]
    """Fields of ``Request``."""
    length_tokens: int | None
    notes: tuple[str, ...]
    trainer: TrainerName
    source: str
    held_tokens: int | None
    """Longest sequence that the file's token budget holds, as it is shared in it; None: unknown."""
    required: tuple[str, ...] = ()
    """Changes without which the file trains by a step that is not predicted."""

    @property
    def of_a_step(self) -> dict[str, Any]:
        """The settings that the trainer's step has: without ZeRO-3 that is taken as FSDP2."""
        return {n: v for n, v in self.settings.items() if not TRAINERS[self.trainer].refused([n])}

    @property
    def kept(self) -> dict[str, Any]:
        """The settings but for those that a recommendation chooses itself."""
        chosen = _CHOSEN if FILE_WORDS[self.trainer].words else ()
        return {n: value for n, value in self.settings.items() if n not in (*SAVING, *chosen)}

    def changes_to(self, cell: Cell, length_tokens: int) -> tuple[str, ...]:
        """Changes to the file, in its own keys, with which a cell trains a length."""
        settings, own, degree = cell.settings, self.settings, cell.layout.context_degree
        row = FILE_WORDS[self.trainer]
        if not row.words:
            taken = {n: own[n] for n in (*SAVING, "sequences_per_micro_batch") if n in own}
            before = settings.replace(**taken, allocator="native")
            return (*self.required, *changes(self.trainer, before, settings))
        budget_tokens = -(-settings.sequences_per_micro_batch * length_tokens // degree)
        chosen: tuple[Any, ...] = ([degree], budget_tokens, settings.offloads_model)
        told: dict[str, Any] = dict(zip(_CHOSEN, chosen, strict=True))
        if (rows := "sequences_per_micro_batch") in own:
            told = {**told, rows: getattr(settings, rows), "token_budget": own.get("token_budget")}
        words = {**row.words, row.rows: rows}.items()
        named = {n: told[w] for n, w in words if w in told and told[w] != own.get(w)}
        texts = (f"{n.rpartition('.')[2]}: {v}".lower() for n, v in named.items())
        said = (f"`{text.translate({91: None, 93: None})}`" for text in texts)
        return tuple(dict.fromkeys((*self.required, *said)))


def settings_of(
    trainer: TrainerName, path: Path, *, gpus: int, typed: Mapping[str, Any], length: int | None = 0
) -> FileSettings:
    """Read a step on ``gpus`` GPUs from a user's file of a trainer, without the ``typed`` settings,
    and without a token budget that does not hold a ``length`` (None: the file's own).

    Raises UsageError for a file that cannot be read, and for fields that are not predicted.
    """
    if trainer not in FILE_WORDS:
        raise UsageError(
            f"{TRAINERS[trainer].step} is told by no file that is read here",
            hint=f"leave `--trainer-config` out, or name its trainer: `--trainer {_whose(path)}`",
        )
    words, source = FILE_WORDS[trainer], path.name
    read = flat_fields if words.words else yaml_fields
    config = read(file_content(path), path, hint=f"name the file that {trainer} takes")
    launcher = launcher_of(config, path) if words.length else config
    for name in (*_ALL.refused, *words.refused):
        value = config.get(name)
        if value and (value is True or value not in (*_USUAL, *words.usual)):
            raise _unknown(source, name, value)
    for name, value in _ALL.eager.items():
        if config.get(name) == value:
            raise _unknown(source, name, value)
    notes, required = list[str](), tuple[str, ...]()
    is_known = not TRAINERS[trainer].refused(["deepspeed"])
    found: dict[str, Any] = {} if words.words else _sharing(config, launcher, path, gpus)
    if not is_known and found.get("deepspeed") == "zero3":
        notes.append(ZERO_NOTE)
        found = {"deepspeed": "zero3"}
    if words.length:
        if "copies" in found and "copies" not in typed:
            notes.append(f"{source} shards nothing; FSDP from elsewhere is `--copies 1`")
        found = _training(words, config, source, typed, notes) | found
        traits = TRAITS.get(typed.get("objective", "sft"), TRAITS["sft"])
        found["sequences_per_micro_batch"] *= traits.documents_together  # a row may be a pair
        first, _, value = (own := TRAINERS[trainer].reference_first).partition(": ")
        # with adapters the frozen model is the reference
        has_second = traits.reference == "margin" and {**found, **typed}.get("lora") is None
        if has_second and own and str(config.get(first)).lower() != value:
            notes.append(KEPT_REFERENCE)
            required = (f"`{own}`",)
        if "paged" in found and not (is_known and (gpus == 1 or "copies" in found)):
            notes.append("paged moments are taken as on the GPU, which takes more")
            del found["paged"]
        if found.get("lora_base") == "nf4" and found.get("deepspeed") == "zero2":
            notes.append("ZeRO-2 beside a model in NF4 is taken as DDP, which shares nothing")
            found |= {"deepspeed": "none", "deepspeed_bucket": None, "copies": [gpus]}
        elif found.get("lora_base") == "nf4" and gpus > 1 and "copies" not in found:
            found["copies"] = [1]
    elif words.words:
        found = _by_words(words, config, source, gpus, notes)
        if "token_budget" in found and not config.get(words.by_tokens):
            required = (f"`{words.by_tokens.rpartition('.')[2]}: true`",)
    else:
        notes.append(f"{source} says how processes share, and the script all the rest")
    known = {words.length, words.rows, words.targets, words.optimizer, *_ALL.known, *_ALL.refused}
    known |= {*words.rank, *words.alpha, *words.fused, *words.on_host}
    known |= {*words.passed, *words.refused, *words.words}
    says = [name for name, value in config.items() if value is not False]
    left = [name for name in says if not any(fnmatchcase(name, str(each)) for each in known)]
    if left:
        notes.append(f"what {source} says of these is not predicted: {', '.join(sorted(left))}")
    length_tokens = found.pop("length", _whole(config, words.length, source, usual=0)) or None
    given = {*typed, *MEMORY[trainer].fixed_fields(found)}
    # a field that belongs to a typed setting is not taken from the file
    given |= {own for name, own in (("loss", "liger"), ("optimizer", "paged")) if name in given}
    taken = {name: value for name, value in found.items() if name not in given}
    refused = [n for n in TRAINERS[trainer].refused(taken) if taken[n] != "zero3"]  # is FSDP2
    for name in refused:
        if taken[name] != RUNG_ROWS[name].default:
            value = "false" if name == "recompute" else taken[name]
            raise _unknown(source, _THEIRS.get(name, name), value)
    settings = {name: value for name, value in taken.items() if name not in refused}
    held = settings.get("token_budget", 0) * settings.get("ulysses", [0])[0] or None
    if held is not None and held < ((length_tokens if length is None else length) or 0):
        del settings["token_budget"]
        notes.append(f"the token budget of {source} holds {held:,} tokens, and is left out")
    return FileSettings(settings, length_tokens, tuple(notes), trainer, source, held, required)


def _whose(path: Path) -> str:
    """The trainer that knows most of the fields in a user's file."""
    config = flat_fields(file_content(path), path, hint="name the file that your trainer takes")

    def known(row: FileWords) -> int:
        words = {row.length, row.rows, row.targets, *row.rank, *row.alpha, *row.words, *row.passed}
        return len(words & {*config})

    return max(FILE_WORDS, key=lambda name: known(FILE_WORDS[name]))


_AS_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "sleep_level": lambda is_asleep: None if is_asleep else 0,
    "lora_targets": lambda names: ",".join(names) if isinstance(names, list) else names.strip("[]"),
}
"""Values of a request's fields, from those in a file that is read by the words of ``emit``."""


def _by_words(
    words: FileWords, config: FileFields, source: str, gpus: int, notes: list[str]
) -> dict[str, Any]:
    """Settings, and the length, from a file by the words with which ``emit`` writes one. Raises
    UsageError for other values of what has only one.
    """
    keys: dict[str, str] = {}
    is_counted = bool(config.get(words.rows)) and not config.get(words.by_tokens)
    for key, word in words.words.items():
        if is_counted and (word == "token_budget" or key.endswith("use_dynamic_bsz")):
            continue
        if config.get(key) is not None and isinstance(word, str):
            keys.setdefault(word, key)
        elif config.get(key) not in (None, word):
            raise _unknown(source, key, config[key])
    found = {n: _AS_FIELDS.get(n, lambda v: v)(config[key]) for n, key in keys.items()}
    found |= {n: _whole(config, keys[n], source) for n in ("ulysses", "token_budget") if n in keys}
    found["ulysses"] = [found.get("ulysses", 1)]
    rows = "sequences_per_micro_batch"
    found |= {rows: _whole(config, words.rows, source)} if is_counted else {}
    if "response_tokens" in keys:
        parts = ("prompt_tokens", "response_tokens")
        found["length"] = sum(_whole(config, keys.get(n, ""), source, usual=512) for n in parts)
    if (of_file := found.get("gpus", gpus)) != gpus:
        notes.append(f"{source} is for {of_file} GPUs, and {gpus} are asked about")
    names = {"length", rows, *_CHOSEN}
    names |= {*RolloutRequest.__struct_fields__} if "rollout" in found else set()
    names |= {"lora", "lora_alpha", "lora_targets"} if found.get("lora") else set()
    return {"offload": False, **{n: value for n, value in found.items() if n in names}}


def model_in(path: Path) -> str | None:
    """The model that a user's file names, by any trainer's field; None if it names none."""
    config = flat_fields(file_content(path), path, hint="name the file that your trainer takes")
    names = ["base_model", "model_name_or_path", "model"]
    names += [n for row in FILE_WORDS.values() for n, word in row.words.items() if word == "model"]
    return next((str(config[name]) for name in names if config.get(name)), None)


def changes(trainer: TrainerName, before: Settings, after: Settings) -> dict[str, dict[str, Any]]:
    """Changes to a user's file that turn the settings ``before`` into ``after``: text in the
    trainer's keys, or for the environment, mapped to the settings that it changes; empty if files
    cannot express all of them.
    """
    words = FILE_WORDS[trainer]
    rows = after.sequences_per_micro_batch // after.traits.documents_together
    *beside, fused = words.fused
    with_it = f" (beside {listed([*beside, *words.fused_by])})" if beside else ""
    keys = {
        **dict.fromkeys(("loss", "liger"), f"`{fused}: true`{with_it}"),
        "activations": "".join(f"`{name}: true`" for name in words.on_host[:1]),
        "recompute": "`gradient_checkpointing: true`",
        "sequences_per_micro_batch": f"`{words.rows}: {rows}`",
        "offload": RUNG_ROWS["offload"].told.get(after.offload, ("",))[-1],
        "allocator": f"`{ENV_IN_WORDS}` in the environment",
    }
    # what takes more needs no change
    more = {"loss": "full", "activations": "gpu", "offload": False, "allocator": "native"}
    saves = {n for n in keys if getattr(before, n) != getattr(after, n) != more.get(n)}
    saves -= {"liger"} if after.loss == "full" else set()
    said = dict.fromkeys(keys[name] for name in keys if name in saves)
    found = {key: {n: getattr(after, n) for n in saves if keys[n] == key} for key in said}
    return found if words.length and "" not in found else {}


def study_as_told(study: Study, trainer: TrainerName, notes: dict[str, None]) -> Study:
    """A study of ``trainer`` reduced to the trials that can be predicted, with their settings read
    from the user's file; adds to ``notes``. Another trainer's study is returned unchanged.

    Raises UsageError if that file has changed, and if no trial can be predicted.
    """
    foreign, refuse = study.question.foreign, MEMORY[trainer].refuse
    if foreign is None or foreign.trainer != trainer or refuse is None:
        return study
    try:
        content = base_config(foreign)
    except UsageError as error:
        said = f"is of trials whose settings nobody knows any more: {error.problem}"
        raise unfit(study, said, f"put {foreign.base_config_path} back as it was") from error
    is_launched = FOREIGN[foreign.trainer].is_launched
    if is_launched:
        notes[f"the script has the loss: trials in {study.path} are taken to hold logits"] = None
    kept: list[RecordedTrial] = []
    refused: list[str] = []
    for trial in study.trials:
        spec, path = trial.spec, Path(foreign.base_config_path or "")
        try:
            if content is not None:
                told = _of_a_trial(spec.settings, content, is_launched=is_launched)
                read = settings_of(trainer, path, gpus=spec.layout.gpus, typed=dict.fromkeys(told))
                notes |= dict.fromkeys(read.notes)
                own = read.of_a_step
                copies = own.pop("copies", [spec.layout.replicate_degree])
                layout = spec.layout.replace(replicate_degree=copies[0])
                settings = spec.settings.replace(**own)
                spec = spec.replace(settings=settings, layout=layout)
            refuse(spec, study.question.model.shape)
        except UsageError as error:
            refused.append(error.problem)
        else:
            kept.append(trial.replace(spec=spec))
    if refused and not kept:
        raise unfit(study, f"has no trial that is predicted: {refused[0]}")
    cells = tuple(dict.fromkeys(trial.cell for trial in kept))
    question = study.question.replace(cells=cells)
    return study.replace(question=question, trials=tuple(kept))


def _of_a_trial(settings: Settings, content: bytes, *, is_launched: bool) -> set[str]:
    """Names of the settings that a trial sets whatever the file says: the named settings, its batch
    and, if the file does not set them, sharding of states and recomputation.
    """
    named = RUNG_ROWS.keys() & settings.named
    named |= {name for name in RUNG_ROWS if name.startswith("lora")} if settings.lora else set()
    shares = is_launched and b"distributed_type" in content
    recomputes = re.search(rb"(disable_gradient|activation)_checkpointing\b", content)
    named |= {"sequences_per_micro_batch", "micro_batches"}
    return named | (set() if shares else {"copies"}) | (set() if recomputes else {"recompute"})


def _training(
    words: FileWords, config: FileFields, source: str, typed: Iterable[str], notes: list[str]
) -> dict[str, Any]:
    """Settings of the training in one process."""
    found: dict[str, Any] = {
        "sequences_per_micro_batch": _whole(config, words.rows, source),
        "micro_batches": min(2, _whole(config, "gradient_accumulation_steps", source)),
    }
    recomputed = config.get("gradient_checkpointing")  # offload, and unsloth's, which does so, too
    is_on_host = isinstance(recomputed, str) or any(config.get(name) for name in words.on_host)
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        is_on_host |= bool(re.search(r"\boffload\W+true", str(config.get(name)).lower()))
    found["activations"] = "host" if is_on_host else "gpu"
    fsdp = {} if words.recomputes else mapping_in(config, "fsdp_config")
    asked = config.get("gradient_checkpointing", words.recomputes)
    is_asked = asked or fsdp.get("activation_checkpointing")
    if not is_asked or any(config.get(name) for name in words.keeps_all):
        found["recompute"] = "none"
    found |= _kernels(words, config, source, notes)
    if config.get(words.adapters[0]) in words.adapters[1]:
        rank = _whole(config, words.rank[0], source, usual=words.rank[1])
        targets = config.get(words.targets) or "all"
        names = [*map(str, targets)] if isinstance(targets, list) else str(targets).split(",")
        is_all = {"all", ALL_LINEAR} & {*names}
        found |= {"lora": rank, "lora_targets": ALL_LINEAR if is_all else ",".join(names)}
        usual = words.alpha[1] or 2 * rank
        found["lora_alpha"] = float(_whole(config, words.alpha[0], source, usual=usual))
        is_narrow = config.get(words.four_bits[0]) in words.four_bits[1]
        found["lora_base"] = "nf4" if is_narrow else "bf16"
    optimizer = str(config.get(words.optimizer) or "adamw")
    known = (name for name, form in _OPTIMIZERS.items() if re.fullmatch(form, optimizer))
    found["optimizer"] = next(known, None)
    if found["optimizer"] is None and "optimizer" not in typed:
        raise _unknown(source, words.optimizer, optimizer)
    if optimizer.startswith("paged"):
        found["paged"] = True
    elif found["optimizer"] == "adamw-8bit":
        notes.append(f"{optimizer} is taken as torchao's AdamW of 8 bits")
    return found


def _kernels(words: FileWords, config: FileFields, source: str, notes: list[str]) -> dict[str, Any]:
    """Settings for Liger's kernels in the step: all of them, only the loss's, or none."""
    is_cut, own = bool(config.get("cut_cross_entropy")), mapping_in(config, "liger_kernel_config")
    *layers, loss = [bool(config.get(name)) for name in words.fused]
    if loss and own:
        layers = [own.get(name, True) for name in ("rope", "rms_norm", "swiglu")]
        loss = own.get("fused_linear_cross_entropy", True)
    if is_cut:
        notes.append("Cut Cross Entropy is taken as Liger's loss, which takes a little more")
    is_fused = loss or is_cut
    if any(layers) and not (is_fused and all(layers)):
        notes.append(f"{source} fuses some of Liger's layers: taken as none, which takes more")
    is_alone = is_fused and not all(layers)
    return {"loss": "chunked" if is_fused else "full", "liger": "loss" if is_alone else "all"}


def _sharing(config: FileFields, launcher: FileFields, path: Path, gpus: int) -> dict[str, Any]:
    """Settings for sharing states: FSDP, DeepSpeed, or copies. UsageError for other ways."""
    for name, size in mapping_in(launcher, "parallelism_config").items():
        if name.endswith(("tp_size", "sp_size", "cp_size")) and str(size or 1) != "1":
            raise _unknown(path.name, name, size)
    mode, zero = launcher.get("distributed_type"), config.get("deepspeed")
    if zero or mode == "DEEPSPEED":
        return _by_zero(zero or mapping_in(launcher, "deepspeed_config"), path)
    fsdp = {**fsdp_keys(config), **fsdp_keys(launcher)}
    if not (config.get("fsdp") or config.get("fsdp_version") or fsdp or mode == "FSDP"):
        return {"offload": False, **({"copies": [gpus]} if gpus > 1 else {})}
    found: dict[str, Any] = {"offload": False}
    if fsdp.get("fsdp_activation_checkpointing_offload"):
        found["activations"] = "host"
    if fsdp.get("fsdp_offload_params") or "offload" in str(config.get("fsdp")):
        found["offload"] = True
    return found


_ZERO = {
    (2, False, False): "zero2",
    (2, True, False): "zero2-offload",
    (3, False, False): "zero3",
    (3, True, False): "zero3-optimizer-offload",
    (3, True, True): "zero3-offload",
}
"""Our setting ``deepspeed``, by the stage, and by what is on the host: optimizer, parameters."""
_ZERO_BUCKET = 500_000_000
"""Default numbers in DeepSpeed's bucket of gradients (deepspeed/runtime/zero/config.py)."""


def _by_zero(zero: Any, path: Path) -> dict[str, Any]:
    """Settings of DeepSpeed, from its file, from accelerate's fields, or by the name of a template
    not on this machine. Raises UsageError for stages and offload that are not predicted.
    """
    fields = mapping_in({"zero": zero}, "zero")
    named = fields.get("deepspeed_config_file") or zero
    if isinstance(named, str):
        beside = next((each for each in (path.parent / named, Path(named)) if each.is_file()), None)
        if beside is not None:  # JSON is YAML
            fields = yaml_fields(file_content(beside), beside, hint="name DeepSpeed's own file")
        elif stage := re.search(r"z(?:ero)?[_-]?(\d)", named):
            is_away = "offload" in named
            of_params = "cpu" if is_away and stage[1] == "3" else "none"
            fields = {"stage": stage[1], "offload_param_device": of_params}
            fields["cpu_offload"] = is_away and "param" not in named
            # trainers' own templates have this for stage 3, and the default for stage 2
            fields |= {"reduce_bucket_size": "auto"} if stage[1] == "3" else {}
    section = mapping_in(fields, "zero_optimization") or fields
    devices = [
        mapping_in(section, f"offload_{what}").get("device")
        or section.get(f"offload_{what}_device")
        for what in ("optimizer", "param")
    ]
    devices[0] = "cpu" if section.get("cpu_offload") else devices[0]
    optimizer, params = (str(device or "none").lower() for device in devices)
    stage = str(section.get("stage", section.get("zero_stage")))
    key = (int(stage) if stage.isdecimal() else 0, optimizer == "cpu", params == "cpu")
    form = _ZERO.get(key) if {optimizer, params} <= {"cpu", "none"} else None
    if form is None:
        raise _unknown(path.name, "deepspeed", "its stage or its offload")
    bucket = section.get("reduce_bucket_size", _ZERO_BUCKET)
    if bucket == "auto":
        return {"deepspeed": form}
    # overlapped communication fills a second bucket
    buckets = 2 if form.startswith("zero2") and section.get("overlap_comm") else 1
    return {"deepspeed": form, "deepspeed_bucket": buckets * int(float(bucket))}


def _whole(config: FileFields, name: str, source: str, *, usual: int = 1) -> int:
    """Integer value of a field. Raises UsageError for other values, such as ``auto``."""
    value = config.get(name) or usual
    if not str(value).isdecimal():
        raise UsageError(
            f"{source} has {name}: {value}, which is no whole number",
            hint=f"write one, for example `{name}: {usual or 8192}`",
        )
    return int(value)


def _unknown(source: str, name: str, value: Any) -> UsageError:
    hint = f"take `{name}` out of it, or set it otherwise, to predict the rest"
    if name == "context_parallel_size":
        value = f"{value}, ring attention over {value} GPUs beside Hugging Face's step"
        hint += "; without `--trainer` and its file `--ring` says what a ring of our engine takes"
    objective = {"rm": "rw"}.get(str(value), str(value))
    if objective in TRAITS:
        hint = f"without the file `--trainer trl --objective {objective}` predicts TRL's step"
    if name == _THEIRS["recompute"]:
        hint = f"write `{name}: true` into it: it frees most of what layers keep, and is predicted"
    return UsageError(f"{source} has {name}: {value}, which is not predicted", hint=hint)
