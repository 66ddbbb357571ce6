"""Emitted: a recommendation as a trainer's configuration, and the parts that all trainers share.

Logits: Hugging Face's loss, like torchtitan's, makes a float32 copy of all logits, whose gradient
is as large. A fused loss makes a few at a time, and exists for some families only. Sources:
``MODEL_TYPE_TO_APPLY_LIGER_FN`` of liger-kernel 0.8.1 and 0.8.5, but granite, whose patch refuses
the fused loss; ``integrations/cut_cross_entropy/README.md`` of axolotl 0.19.0; ``ForCausalLMLoss``
in ``loss/loss_utils.py`` of transformers 5.6.0.
"""

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from highwater.errors import ModelError, UsageError
from highwater.model.model import ModelShape, load_model
from highwater.model.rope import Yarn
from highwater.nouns.codec import Record, packaged
from highwater.nouns.declaration import words_of
from highwater.nouns.environment import allocator_environment
from highwater.nouns.hardware import kind_of
from highwater.nouns.layout import WIDEST_FUSED_HEAD, Layout
from highwater.nouns.objective import ALL_LINEAR, Lora, Objective, OptimizerName
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trainer import Target, is_step_of, step_in_words
from highwater.units import format_bytes, format_tokens

Value = bool | int | float | str
WHOLE_SHARDS = (
    "moments of 8 bits that are updated in pieces: torchao updates a whole shard at once, which "
    "takes 8 bytes for each number of the largest"
)
"""Sentence on settings that a trainer with torchao's 8-bit moments cannot express."""
OPTIMIZERS: Mapping[OptimizerName, str] = {
    "adamw": "adamw_torch_fused",
    "adamw-8bit": "adamw_torch_8bit",
}
"""``optim`` of transformers' trainer for each optimizer, its default first. The second is torchao's
``AdamW8bit``, compared with ours in tests/numeric/test_low_bit.py, which FSDP2 can shard, unlike
bitsandbytes'. There is none with moments in bfloat16 and parameters in float32."""
DIVIDED = (
    "{} rollout engines of one GPU each: how they are divided is not part of the recommendation"
)
"""Sentence on the GPUs set aside for rollout, with their number."""
DATASET = "REPLACE-WITH-YOUR-DATASET"
"""Stand-in for data, which the user has to name in a file."""


class Emitted(Record, frozen=True, kw_only=True):
    """A configuration for a trainer: its text, further files, and what it cannot say."""

    schema_version: int = 1
    target: Target
    checked_with: str
    """Version of the trainer's package that the names are from."""
    values: dict[str, Value]
    """Settings by name, with sections joined by dots."""
    environment: dict[str, str]
    """Variables to set before any process starts, Ray's included."""
    cannot: tuple[str, ...] = ()
    """Parts of the recommendation that the trainer cannot express, which the text also names."""
    fits: bool | None = None
    """True: it fits by a prediction of this trainer's own step. None: that step is not predicted.
    False: the logits exceed a GPU, alone or with the rest of the predicted step."""
    logits_bytes: int | None = None
    """Bytes of a GPU for logits, if the trainer's loss holds them whole; else None."""
    beside: dict[str, str] = msgspec.field(default_factory=dict)
    """Contents of further files that the text names, by file name."""
    command: str
    """The command that starts the training."""
    text: str
    """Content of the file."""

    @property
    def alone(self) -> str:
        """The configuration's text without the files ``beside``, with a comment that names them."""
        half = "# This is half of the configuration: `-o DIR` writes the rest, too. Beside it "
        return self.text.replace("# beside it ", half, 1).rstrip("\n")


class Dialect(NamedTuple):
    """A trainer that configurations are written for: its names, and the texts that the
    configurations of every such trainer have.
    """

    target: Target
    name: str
    """The trainer's name as its users write it."""
    version: str
    """Version of the trainer's package that the names are from."""

    def emitted(
        self,
        found: Recommendation,
        chosen: Candidate,
        said: Collection[str],
        values: dict[str, Value],
        *,
        command: str,
        start: str = "start",
        environment: Mapping[str, str] = MappingProxyType({}),
        cannot: Collection[str] = (),
        yarn: str | None = None,
        logits_bytes: int | None = None,
        beside: Mapping[str, str] = MappingProxyType({}),
        text: Callable[[str], str] | None = None,
    ) -> Emitted:
        """Make the configuration: values below a comment with the heading, ``said``, parts that the
        trainer cannot express, the model's YaRN block with the reason ``yarn``, and, after the word
        ``start`` (empty: not), the command. ``text`` makes the file from the comment; None: YAML.
        """
        refuse_kept_attention(self.name, chosen.cell.settings)
        refuse_packed_shards(self.name, chosen.cell)
        comments = comment(
            [
                *self._heading(found, chosen, logits_bytes),
                *said,
                *(f"{self.name} cannot express {each}" for each in cannot),
                *(() if yarn is None else yarn_lines(found, why=yarn)),
                *((f"{start}: {command}",) if start else ()),
            ]
        )
        return Emitted(
            target=self.target,
            checked_with=self.version,
            values=values,
            environment=dict(environment),
            cannot=tuple(cannot),
            logits_bytes=logits_bytes,
            beside=dict(beside),
            command=command,
            text=comments + yaml_text(values) if text is None else text(comments),
        )

    def _heading(
        self, found: Recommendation, chosen: Candidate, logits_bytes: int | None
    ) -> list[str]:
        """Lines on the configuration: its purpose, and the prediction or comparison behind it."""
        rollout = f", {found.rollout_gpus} more for rollout" if found.rollout_gpus else ""
        title = (
            f"{self.name} {self.version}: {found.model_name}, {format_tokens(found.length_tokens)} "
            f"tokens, {found.gpus} x {found.device_name}{rollout}"
        )
        yours = (
            f"{self.name}'s settings that hold memory; what it learns, from what and how long is "
            "yours to add"
        )
        why = found.accuracy if chosen.source == "predicted" else f"in {chosen.found_in}"
        behind = f"{chosen.source} for {step_in_words(found.trainer)} ({why})"
        if not is_step_of(found.trainer, self.target):
            first = unpredicted(found, chosen, name=self.name, logits_bytes=logits_bytes)
            return [first, title, chosen.label, f"the comparison: {behind}", yours]
        if chosen.source in ("published", "simulated"):
            behind = f"{chosen.source}, {found.accuracy}"
        capacity = (
            f"up to {format_tokens(chosen.capacity_tokens)} "
            f"tokens{' or more' * chosen.is_at_least} ({chosen.capacity_source})"
        )
        room = chosen.headroom_bytes
        headroom = "headroom unknown" if room is None else f"{format_bytes(room)} of headroom"
        headroom += "" if chosen.risk is None else f", {chosen.risk}"
        first = f"{chosen.label}: {headroom}, {capacity}"
        return [title, first, *_bought(found, chosen), behind, yours]

    def other_objective(
        self, objective: Objective, known: Collection[Objective] = ("sft",), *, is_written: bool
    ) -> str | None:
        """Sentence that the trainer lacks an objective, and on those it has; None if it has it."""
        if objective in known:
            return None
        has = ", ".join(known)
        if is_written:
            return f"{self.name}'s configuration is written for {has}, not for {objective}"
        return f"{self.name} trains {has}, not {objective}"

    def refuse_optimizer(self, settings: Settings) -> None:
        """Raise UsageError for an optimizer that transformers lacks, and for bf16 parameters."""
        is_narrow = settings.parameters != "float32"
        if not is_narrow and settings.optimizer in OPTIMIZERS:
            return
        asked: dict[str, object] = {"optimizer": settings.optimizer}
        asked |= {"parameters": settings.parameters} if is_narrow else {}
        what = "parameters in bf16 with its rounding" if is_narrow else settings.optimizer
        raise UsageError(
            f"{self.name} has no {what}", hint=f"leave `{shlex.join(words_of(asked))}` out"
        )

    def shared_copies(self, layout: Layout) -> str | None:
        """Sentence that a sequence would span copies, which the trainer cannot do; else None."""
        if layout.shard_degree % layout.context_degree == 0:
            return None
        return (
            f"{self.name} shares a sequence inside a copy, of {layout.shard_degree} GPUs, not "
            f"among {layout.context_degree}"
        )

    def whole_alpha(self, lora: Lora) -> int:
        """LoRA's alpha as an integer. Raises UsageError for a fraction."""
        if lora.alpha != int(lora.alpha):
            raise UsageError(
                f"{self.name}'s lora_alpha is a whole number, and {lora.alpha} is not",
                hint=f"use `--lora-alpha {max(1, round(lora.alpha))}`",
            )
        return int(lora.alpha)

    def one_dtype(self, field: str) -> str:
        """Line of a comment: a frozen model has the dtype of its adapters, set in ``field``."""
        return (
            f"{self.name} has one dtype for adapters and the frozen model, {field}: float32, which "
            "counts 4 bytes for each of its parameters; bf16 would train adapters in bf16"
        )


def refuse_kept_attention(name: str, settings: Settings) -> None:
    """Raise UsageError for a policy of recomputation that the trainer ``name`` has no word for."""
    if settings.recompute == "all-but-attention":
        problem = f"{name} recomputes whole layers: it keeps no attention"
        raise UsageError(problem, hint="use `--recompute layer`")


def refuse_packed_shards(name: str, cell: Cell) -> None:
    """Raise UsageError for shards of a model in NF4, which accelerate's FSDP2 does not make."""
    if cell.settings.lora_base == "nf4" and cell.layout.shard_degree > 1:
        problem = f"{name} is started with a copy of a model in NF4 on each GPU, not with shards"
        raise UsageError(problem, hint=f"use `--copies {cell.layout.gpus}`")


def other_optimizer(settings: Settings) -> dict[str, Value]:
    """The ``optim`` field of an optimizer; empty for the default."""
    name = settings.optimizer
    return {} if name == Settings().optimizer else {"optim": OPTIMIZERS[name]}


def yaml_text(values: Mapping[str, Value]) -> str:
    """YAML text of values whose dotted names become nested sections and lists."""
    import yaml  # not above: the grammar of the command line needs only the names of targets

    return yaml.safe_dump(nested(values), sort_keys=False, allow_unicode=True)


def environment(settings: Settings) -> dict[str, str]:
    """Environment variables that settings need before any process starts."""
    return allocator_environment("expandable") if settings.allocator == "expandable" else {}


def exports(variables: Mapping[str, str], *, before: str = "it starts") -> list[str]:
    """Lines of a comment that export variables in a shell; empty without variables."""
    words = [f"{name}={value}" for name, value in variables.items()]
    return [f"before {before}: export {' '.join(words)}"] if words else []


def model_lies(model_path: str | None, *, before: str = "it starts") -> list[str]:
    """Lines of a comment on where to name the model's directory; empty if it is named."""
    return [] if model_path else [f"before {before}: export MODEL_PATH=the model's directory"]


def yaml_path(model_path: str | None) -> str:
    """The model's directory for a file that OmegaConf reads; None: a variable's interpolation."""
    return "${oc.env:MODEL_PATH}" if model_path is None else literal(model_path)


def shape_here(found: Recommendation, model_path: str | None) -> ModelShape | None:
    """The shape of a recommendation's model; None if its files are not on this machine."""
    try:
        return load_model(model_path or found.model_name).shape
    except ModelError:
        return None


ATTENTIONS = {
    "flex_attention": "flex_attention: this class has attention sinks, and no flash_attention_2; "
    "on Hopper it takes kernels-community/vllm-flash-attn3, too. Its memory is predicted as a "
    "fused kernel's, and nobody measured it",
    "sdpa": f"sdpa: flash_attention_2 takes no heads of more than {WIDEST_FUSED_HEAD} numbers",
}
"""Sentences on attentions other than flash_attention_2."""


def fused_attention(shape: ModelShape | None) -> str:
    """Name in transformers of a shape's fused attention; None, unknown: ``flash_attention_2``."""
    if shape is not None and shape.widest_head > WIDEST_FUSED_HEAD:
        return "sdpa"
    has_sinks = shape is not None and any(run.kind.attention.has_sinks for run in shape.runs)
    return "flex_attention" if has_sinks else "flash_attention_2"


Obstacle = Callable[[Objective, Layout], str | None]
"""Returns the reason why a trainer cannot train an objective in a layout; None if it can."""


def refuse_obstacle(cell: Cell, obstacle: Obstacle) -> None:
    """Raise UsageError for a cell that a trainer cannot train; the hint has the fewest changes."""
    asked, layout = cell.settings.objective, cell.layout
    problem = obstacle(asked, layout)
    if problem is None:
        return
    changes: dict[str, object] = {name: 1 for name, n in layout.degree_settings.items() if n > 1}
    plain = Settings().objective
    changes |= {} if asked == plain else {"objective": plain}
    ways = (way for size in range(1, len(changes) + 1) for way in combinations(changes, size))
    works = [
        {name: changes[name] for name in way}
        for way in ways
        if obstacle(plain if "objective" in way else asked, layout.without(way)) is None
    ]
    least = [f"`{shlex.join(words_of(way))}`" for way in works if len(way) == len(works[0])]
    raise UsageError(problem, hint=f"use {' or '.join(least)}")


def to_replace(*names: str, settings: Settings) -> str:
    """Comment on the fields that a user fills in; with gradient accumulation if it is used."""
    steps = ("gradient_accumulation_steps",) if settings.accumulates else ()
    return f"yours to replace: {', '.join((*names, *steps))}"


def listed(name: str, values: Iterable[Value]) -> dict[str, Value]:
    """A list as numbered keys: ``{"a.0": 1, "a.1": 2}``."""
    return {f"{name}.{number}": value for number, value in enumerate(values)}


def lora_words(lora: Lora) -> str:
    """Flags that name these adapters: ``--lora 32 --lora-targets q_proj,v_proj``."""
    words: dict[str, object] = {"lora": lora.rank}
    words |= {} if lora.alpha == 2 * lora.rank else {"lora_alpha": lora.alpha}
    words |= {} if lora.targets == ALL_LINEAR else {"lora_targets": lora.targets}
    return shlex.join(words_of(words))


def refuse_several_machines(layout: Layout, device_name: str) -> None:
    """Raise UsageError for GPUs of several machines: configurations are for one machine."""
    if layout.is_several_machines:
        kind = kind_of(device_name)
        gpus = f"{layout.machine_gpus}{f'x{kind.name}' if kind else ''}"
        each = 1 if layout.replicate_degree < layout.gpus else layout.machine_gpus  # as of NF4
        gpus += f" --copies {each}" * (layout.replicate_degree > 1)
        raise UsageError(
            f"a configuration is of one machine, and {layout.gpus} GPUs are of several",
            hint=f"`--gpus {gpus}` is of one of them",
        )


def unpredicted(
    found: Recommendation, chosen: Candidate, *, name: str, logits_bytes: int | None
) -> str:
    """Sentences for a trainer that is not predicted: the predicted step's memory for comparison,
    and that of the trainer's full logits; or, if these exceed a GPU, that the length does not fit.
    """
    what = f"{found.model_name} at {format_tokens(found.length_tokens)} tokens"
    room_bytes = found.device_bytes - found.reserved_bytes
    each = f"each GPU's {format_bytes(room_bytes)}"
    logits = (
        f"{name}'s loss holds whole logits, 10 bytes for each token and word of the vocabulary: "
        f"{format_bytes(logits_bytes or 0)} of {each}"
    )
    step = step_in_words(found.trainer).partition(",")[0]
    if logits_bytes is not None and exceeds(found, chosen, logits_bytes):
        with_them = format_bytes(bytes_with_logits(found, chosen, logits_bytes))
        rest = f"{with_them} with the rest that {step} takes, {chosen.source}"
        rest = "for them alone" if logits_bytes > room_bytes else rest
        return f"No: {what} does not fit. {logits}, {rest}."
    takes = f"{step} trains it"
    if chosen.headroom_bytes is not None:
        takes = f"{step} takes {format_bytes(room_bytes - chosen.headroom_bytes)} of {each}"
    said = f"Not predicted for this trainer: nobody measured what {name} takes for {what}."
    said += f" For comparison, {takes}, {chosen.source}."
    said = f"{said} {chosen.cell.settings.traits.outside_step}".rstrip()
    if logits_bytes is None:
        return said
    with_them = format_bytes(bytes_with_logits(found, chosen, logits_bytes))
    return f"{said} {logits}; {with_them} with the rest of that comparison."


def _bought(found: Recommendation, chosen: Candidate) -> list[str]:
    """Sentence on the memory that a chunked loss saves; empty if full logits are not predicted."""
    cell = chosen.cell.changed(loss="full")
    whole = next((each for each in found.candidates if each.cell == cell != chosen.cell), None)
    if whole is None or whole.headroom_bytes is None or chosen.headroom_bytes is None:
        return []
    less = format_bytes(chosen.headroom_bytes - whole.headroom_bytes)
    ends = f"end at {format_tokens(whole.capacity_tokens)} tokens"
    ends = ends if whole.capacity_tokens else "fit at no length"
    return [f"its chunked loss takes {less} less of each GPU than whole logits, which {ends}"]


def yarn_lines(found: Recommendation, *, why: str) -> list[str]:
    """Lines of a comment with YaRN's block for the model's config.json; empty if not needed."""
    if found.yarn is None:
        return []
    return [f"YaRN: {why}; in the model's config.json:", json.dumps(found.yarn.block)]


def yarn_values(yarn: Yarn | None, section: str) -> dict[str, Value]:
    """YaRN's block as values below ``section``, which overrides the model's config; None: empty."""
    if yarn is None:
        return {}
    parameters = yarn.rope_parameters.items()
    return {
        **{f"{section}.rope_parameters.{name}": value for name, value in parameters},
        f"{section}.max_position_embeddings": yarn.max_position_embeddings,
    }


def answered_first(found: Emitted, answer: str) -> Emitted:
    """The configuration with ``answer`` as the first comment of each file but JSON."""
    beside = {name: _answered_first(text, answer) for name, text in found.beside.items()}
    return found.replace(text=_answered_first(found.text, answer), beside=beside)


def _answered_first(text: str, answer: str) -> str:
    first, end, rest = text.partition("\n")
    if first.startswith("#!"):
        return f"{first}{end}{comment([answer])}{rest}"
    return f"{comment([answer])}{text}" if first.startswith("# ") else text


def comment(lines: list[str]) -> str:
    """The lines as a comment of YAML or a shell; unprintable characters become ``?``."""
    return "".join(f"# {''.join(c if c.isprintable() else '?' for c in line)}\n" for line in lines)


def literal(text: str) -> str:
    r"""Escape a text for OmegaConf, so that ``${`` begins no interpolation: ``\${``. Backslashes
    have a meaning only before ``${``.

    Source: OmegaConf's grammar, checked with 2.3.1.
    """
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest values by name: ``{"a.b": 1, "c.0.d": 2}`` to ``{"a": {"b": 1}, "c": [{"d": 2}]}``."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return {name: _with_lists(value) for name, value in tree.items()}


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    held = {name: _with_lists(value) for name, value in tree.items()}
    return list(held.values()) if held and all(name.isdecimal() for name in held) else held


_FUSED = packaged("trainers/fused_losses.json", dict[str, frozenset[str]])
LIGER = _FUSED["liger"]
"""Families that train here and whose loss Liger fuses."""
CUT_CROSS_ENTROPY = _FUSED["cut_cross_entropy"]
"""Families that train here, whose loss Axolotl fuses by Cut Cross Entropy but not by Liger."""
_ELEMENT_BYTES = 2 + 4 + 4
"""Bytes per logit: the head's in bfloat16, its copy in float32, and that one's gradient."""


def is_fused(cell: Cell, shape: ModelShape | None, families: Collection[str] = LIGER) -> bool:
    """True if a chunked loss is asked for and the trainer fuses it for this family."""
    is_known = shape is None or shape.model_type in families
    return is_known and not cell.settings.holds_logits


def unfused(cell: Cell, why: str) -> tuple[str, ...]:
    """Sentence that the trainer lacks the requested chunked loss; empty if none was requested."""
    return () if cell.settings.holds_logits else (f"--loss chunked {why}: its logits are whole",)


def whole_logits_bytes(chosen: Candidate, shape: ModelShape | None) -> int | None:
    """Bytes of a micro-batch's full logits on one GPU; None without a shape or without logits."""
    if shape is None or chosen.cell.settings.traits.gives_scalars:
        return None
    return _ELEMENT_BYTES * shape.vocab_size * chosen.token_budget_tokens


def bytes_with_logits(found: Recommendation, chosen: Candidate, logits_bytes: int) -> int:
    """Bytes of a GPU for a trainer's full logits and the rest of the predicted step, of which 2 of
    10 bytes for each logit are not counted twice. With unknown headroom, the logits' alone.
    """
    if chosen.headroom_bytes is None:
        return logits_bytes
    used_bytes = found.device_bytes - found.reserved_bytes - chosen.headroom_bytes
    own_bytes = logits_bytes // 5 if chosen.cell.settings.holds_logits else 0
    return used_bytes + logits_bytes - own_bytes


def exceeds(found: Recommendation, chosen: Candidate, logits_bytes: int) -> bool:
    """True if full logits do not fit on a GPU with the rest of the predicted step."""
    room_bytes = found.device_bytes - found.reserved_bytes
    return bytes_with_logits(found, chosen, logits_bytes) > room_bytes
