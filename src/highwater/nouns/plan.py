"""Plan: turn a request into a question for this machine. No process is started."""

import shlex
from collections.abc import Mapping, Sequence

import msgspec

from highwater.errors import HighwaterError, ModelError, UsageError
from highwater.model.families import family_row
from highwater.model.held_bytes import PROCESS_BYTES, device_state_bytes
from highwater.model.model import Model, load_model
from highwater.model.rope import ends_at_native, unscalable, yarn
from highwater.nouns.cells import cells_of, within_token_budget
from highwater.nouns.codec import Record
from highwater.nouns.corpus import pieces
from highwater.nouns.declaration import words_of
from highwater.nouns.environment import refuse_profiling
from highwater.nouns.foreign_request import foreign_of, with_one_count
from highwater.nouns.hardware import Machine
from highwater.nouns.objective import ALL_LINEAR, ATTENTION, expert_targets, refuse_no_target
from highwater.nouns.plan_notes import (
    ON_THE_CPU_NOTE,
    SPARSE_NOTE,
    foreign_notes,
    memory_notes,
    step_notes,
)
from highwater.nouns.request import Request
from highwater.nouns.settings import Rope, Settings
from highwater.nouns.sparse_pattern import SPARSE_KERNEL_BLOCK
from highwater.nouns.study import (
    CEILING_TOKENS,
    PUBLISHED_STEP_TOKENS,
    Cell,
    Grid,
    Proof,
    Question,
    usual_grid,
)
from highwater.nouns.trainer import (
    FOREIGN,
    OURS,
    TRAINERS,
    ForeignTrainer,
    TrainerName,
    foreign_name,
)
from highwater.nouns.trial import PROMPT_TOKENS, Device, TrialSpec, refuse_one_token
from highwater.nouns.trial_hardware import TrialHardware, check_host_memory, cpu_memory, hardware_of
from highwater.units import format_bytes, format_seconds, format_tokens

LONGEST_TOKENS: dict[Device, int] = {"cuda": CEILING_TOKENS, "cpu": 8192}
"""Longest length to try unless one is named; on the CPU attention, quadratic in it, is slow."""


def grid_of(request: Request, model: Model, device: Device) -> tuple[Grid, tuple[str, ...]]:
    """The lengths to try, and notes on a longest length that the user did not set. Predictions use
    steps as fine past the native length as before it, except in the published scan.
    """
    longest, notes = _longest(request, model, device)
    grid = usual_grid(
        model.shape.native_length_tokens,
        start_tokens=request.start_tokens,
        resolution_tokens=request.resolution_tokens,
        max_tokens=longest,
    )
    if request.dry_run and request.method == "bisect":
        finest = min(grid.step_tokens, grid.beyond_step_tokens)
        grid = grid.replace(beyond_step_tokens=finest)
    return grid, notes


def _longest(request: Request, model: Model, device: Device) -> tuple[int, tuple[str, ...]]:
    """The longest length to try, and a note on it: the native one if positions do not scale."""
    native = model.shape.native_length_tokens
    longest, notes = request.max_tokens or LONGEST_TOKENS[device], ()
    if request.max_tokens is None and device == "cpu":
        longest = max(longest, request.start_tokens)
        notes = (
            f"on the CPU lengths end at {format_tokens(longest)}, where a trial takes minutes: "
            "`--start-length 512 --resolution 512 --max-length 2k` ends sooner",
        )
    is_ours = foreign_name(request.trainer) is None  # another trainer scales positions as it likes
    if is_ours and longest > native and ends_at_native(model, request.settings.rope):
        refuse_past_native(
            model, request.settings.rope, request.start_tokens, flag="--start-length"
        )
        longest = native
        why = f"{model.name}'s own RoPE scaling does; `--rope yarn` goes past it"
        if unscalable(model) is not None:
            why = f"{model.name} was made for them, and {unscalable(model)}"
        notes = (f"lengths end at {format_tokens(native)}: {why}",)
    return longest, notes


def other_class(model: Model, trainer: str) -> UsageError | None:
    """The error for a model that another trainer trains differently, else None: the text part of a
    multimodal model, whose vision tower it also keeps on the GPU, which no prediction counts; and
    linear attention, which each trainer computes with different kernels.
    """
    if model.shape.delta is not None and trainer != OURS:
        return UsageError(
            f"{model.name} has layers of linear attention, and nobody has compared how {trainer} "
            f"trains them",
            hint=f"leave `--trainer {trainer}` out: our own trainer trains them",
        )
    if model.text_of is not msgspec.UNSET and trainer != OURS:
        return UsageError(
            f"{model.name} is of the family {model.text_of}, whose vision tower {trainer} loads, "
            f"too: its memory is not counted",
            hint=f"leave `--trainer {trainer}` out: our own trains the text model alone",
        )
    return None


def refuse_past_native(model: Model, rope: Rope, length_tokens: int, *, flag: str) -> None:
    """Raise UsageError for a length past the native one without RoPE scaling; ``flag`` named it."""
    native = model.shape.native_length_tokens
    if length_tokens <= native or not ends_at_native(model, rope):
        return
    length, longest = format_tokens(length_tokens), format_tokens(native)
    if unscalable(model) is not None:
        raise UsageError(
            f"{length} tokens are past the {longest} that {model.name} was made for, and "
            f"{unscalable(model)}",
            hint=f"use `{flag} {native}`",
        )
    raise UsageError(
        f"{model.name} scales its own RoPE up to {longest} tokens: {length} is past it",
        hint=f"add `--rope yarn` to scale by YaRN instead, or stay at {native} or below",
    )


def check_yarn(request: Request, model: Model, longest_tokens: int) -> None:
    """Raise UsageError if YaRN is impossible, or if a model saved with it could not be loaded."""
    obstacle = unscalable(model)
    if request.settings.rope == "yarn" and model.own_rope_scaling and obstacle is not None:
        raise UsageError(
            f"`--rope yarn` cannot replace {model.name}'s own scaling: {obstacle}",
            hint="leave `--rope` out",
        )
    loses_yarn = not family_row(model.shape.model_type).saves_yarn
    if (
        loses_yarn
        and request.settings.save_hf != "never"
        and yarn(model, length_tokens=longest_tokens, rope=request.settings.rope) is not None
    ):
        raise UsageError(
            f"{model.shape.model_type} in transformers takes no YaRN from its config: what is "
            f"saved of {model.name} with it could not be loaded",
            hint="leave `--save-hf` out",
        )


SHORTEST_TIMEOUT_S: Mapping[Device, float] = {"cpu": 10.0, "cuda": 60.0}
"""Shortest timeout of a trial, in seconds, by device. From launch to first step a trial takes
seconds on the CPU, 12 to 21 s on a GPU: less would end every trial before it."""
USUAL_BUDGET_S = 15 * 60.0
"""Seconds for each layout where no budget is named: what one waits for beside other work."""
_TRIALS_OF_A_CELL = 3
"""Trials that share a cell's part of the budget: its edge takes two or three."""


def proof_of(request: Request, model: Model, device: Device) -> Proof:
    """The requested proof; else memory-only on GPUs if possible, unless only a timeout is named."""
    if request.proof is not None:
        return request.proof
    is_timed = request.timeout is not None and request.budget is None
    if device != "cuda" or request.dry_run or is_timed or request.method != "bisect":
        return "full"
    is_other = (
        request.settings.attention != "dense" or request.data is not None or model.shape.layers < 2
    )
    return "full" if is_other else "memory"


def budget_of(
    request: Request, proof: Proof, device: Device, cells: Sequence[Cell]
) -> float | None:
    """Time limit of the search in seconds; None: no limit. UsageError: too short for a trial."""
    if request.budget_s is not None:
        least_s = SHORTEST_TIMEOUT_S[device]
        if request.budget_s < least_s:
            raise UsageError(
                f"a budget of {format_seconds(request.budget_s)} ends before a trial has",
                hint=f"use `--budget {least_s:.0f}s` or more, for example `--budget 15m`",
            )
        return request.budget_s
    is_named = request.proof is not None or request.timeout is not None
    if proof == "full" or is_named:
        return None
    return USUAL_BUDGET_S * len({cell.layout for cell in cells})


def timeout_of(
    request: Request, proof: Proof, budget_s: float | None, device: Device, cells: Sequence[Cell]
) -> float:
    """Time limit of one full trial in seconds: as requested, or a share of the search's budget."""
    if request.timeout is not None or proof == "full" or budget_s is None:
        return request.timeout_s
    return max(SHORTEST_TIMEOUT_S[device], budget_s / (_TRIALS_OF_A_CELL * len(cells)))


_ROW_BYTES = 16
"""Rows of a grouped product are multiples of so many bytes. Source: ``torch._grouped_mm``."""
_NO_PROOF = "leave `--proof` out"
_NOT_IN_PIECES = (
    "a memory-only trial cuts dense attention into pieces, and block-sparse attention is no longer "
    "than its blocks"
)


class Plan(Record, frozen=True, kw_only=True):
    """The question that a search answers, with its limits of time and notes for the user."""

    question: Question
    notes: tuple[str, ...] = ()
    budget_s: float | None = None
    """Seconds that the search may take; None: as long as its trials take."""
    timeout_s: float = 0.0
    """Seconds that one full trial may take."""
    begins_shortest: bool = False
    """True if each cell begins with the start length, whatever is predicted."""


def plan(
    request: Request,
    machine: Machine,
    *,
    trainer: TrainerName = "highwater",
    machines: int = 1,
    cells: tuple[Cell, ...] = (),
) -> Plan:
    """The question that a request asks of a machine and a trainer; with ``nodes``, of so many such
    machines. ``machines``: those that the GPUs of ``machine`` are of. ``cells``: the cells it is
    about, else those of ``cells_of``. Raises ModelError, UsageError or MachineError for a request
    that cannot be met, before anything starts.
    """
    model, here = load_model(request.model), machine
    if request.nodes > 1:
        machine, machines = machine.times(request.nodes), request.nodes
        request = request.replace(gpus=request.gpus or (len(machine.gpus) or machines,))
    device: Device = request.device or ("cuda" if machine.gpus else "cpu")
    asked = request
    if request.device == "cpu" and request.memory is None:
        request = request.replace(memory=cpu_memory(request, machine))
    of_memory = memory_notes(asked, device, request.memory_bytes)
    foreign = foreign_of(request)
    if (error := other_class(model, trainer if foreign is None else foreign.trainer)) is not None:
        raise error
    if foreign is not None:
        planned = _foreign_plan(request, machine, model, device, foreign)
        return planned.replace(notes=(*of_memory, *planned.notes))
    _refuse_attention(request, model, device)
    if request.settings.parameters == "bf16" and (copies := max(request.copies or (1,))) > 1:
        # FSDP2 keeps sums over copies in float32 for longer: how much at a peak is not known
        raise UsageError(
            f"{copies} copies of parameters in bf16 were not predicted right",
            hint="use `--parameters float32`",
        )
    of_adapters: tuple[str, ...] = ()
    if request.settings.adapters is not None:
        request, of_adapters = _adapters_here(request, model)
    if (adapters := request.settings.adapters) is not None:
        refuse_no_target(model.shape, adapters)
    _refuse_experts(request.settings, model, device, trainer)
    hardware = hardware_of(request, machine, model, device)
    grid, capped = grid_of(request, model, device)
    check_yarn(request, model, grid.max_tokens)
    skipped: tuple[str, ...] = ()
    if not cells:
        cells, skipped = cells_of(
            request,
            model.shape,
            device,
            hardware.counts,
            has_ring=not TRAINERS[trainer].refused(["ring"]),
            shards_packed=TRAINERS[trainer].shards_packed,
            machines=machines,
            # how long a user's documents are is not known before they are read
            longest_tokens=grid.max_tokens if request.data is None else None,
        )
    cells, too_small = within_token_budget(cells, grid, device)
    if request.memory_profiler is not None:
        refuse_profiling(request.memory_profiler, gpus=max(cell.layout.gpus for cell in cells))
    if device == "cuda" and not request.dry_run:
        check_host_memory(here, model, cells)
    proof = proof_of(request, model, device)
    budget_s = budget_of(request, proof, device, cells)
    timeout_s = timeout_of(request, proof, budget_s, device, cells)
    question = _question(request, model, hardware, cells, grid)
    if proof == "memory":
        question = question.replace(proof=proof, timeout_s=timeout_s)
    question.trial(cells[0], grid.start_tokens)  # raises for an impossible trial
    settings = cells[0].settings
    notes = (
        *((ON_THE_CPU_NOTE,) if request.device is None and device == "cpu" else ()),
        *(*capped, *of_memory, *of_adapters, *skipped, *too_small),
        *(() if settings.pattern is None else (SPARSE_NOTE,)),
        *step_notes(model, request, settings, device, request.max_tokens),
    )
    return Plan(question=question, notes=notes, budget_s=budget_s, timeout_s=timeout_s)


def _foreign_plan(
    request: Request, machine: Machine, model: Model, device: Device, foreign: ForeignTrainer
) -> Plan:
    """Plan for a foreign trainer, whose own file has the settings; only the allocator varies."""
    request = with_one_count(request, foreign).replace(
        proof="full", loss=FOREIGN[foreign.trainer].loss
    )
    hardware = hardware_of(request, machine, model, device)
    grid, capped = grid_of(request, model, device)
    cells, skipped = cells_of(request, model.shape, device, hardware.counts)
    budget_s = budget_of(request, "full", device, cells)
    question = _question(request, model, hardware, cells, grid)
    question = question.replace(foreign=foreign, prompt_tokens=PROMPT_TOKENS)
    question.trial(cells[0], grid.start_tokens)  # raises for an impossible trial
    fallback = (ON_THE_CPU_NOTE,) if request.device is None and device == "cpu" else ()
    return Plan(
        question=question,
        notes=(*fallback, *foreign_notes(request, foreign, device), *skipped, *capped),
        budget_s=budget_s,
        timeout_s=timeout_of(request, "full", budget_s, device, cells),
    )


def _question(
    request: Request, model: Model, hardware: TrialHardware, cells: tuple[Cell, ...], grid: Grid
) -> Question:
    return Question(
        model=model,
        device=hardware.device,
        device_name=hardware.device_name,
        device_total_bytes=hardware.total_bytes,
        memory_budget_bytes=request.memory_bytes,
        host_memory_bytes=request.host_memory_bytes,
        cells=cells,
        grid=grid,
        method=request.method,
        confirm=request.confirm,
        margin_bytes=request.margin_bytes,
        steps=request.steps,
        micro_batches=request.micro_batches,
        prompt_tokens=request.prompt_tokens or 0,
        hyperparameters=request.hyperparameters,
        data=request.data,
        simulated=request.dry_run,
    )


def plan_trial(request: Request, machine: Machine, length_tokens: int) -> TrialSpec:
    """One trial of a request: the cheapest rung and one GPU, unless the request names others.
    Raises the errors of ``plan``, and UsageError if the request names several layouts.
    """
    refuse_one_token(length_tokens)
    model = load_model(request.model)
    gpus, is_limited = max(request.gpus or (1,)), request.memory is not None
    if request.device is None and not machine.gpus and gpus == 1 and not is_limited:
        fits = _has_room_on_the_cpu(request, machine, length_tokens)
        hint = "add `--device cpu` to train on it" if fits else gpus_hint(request, length_tokens)
        raise UsageError("no GPU is visible, and the CPU is not named", hint=hint)
    if request.trainer not in FOREIGN:
        refuse_past_native(model, request.settings.rope, length_tokens, flag="--length")
    question = plan(alone(request, length_tokens), machine).question
    cell, layouts = question.cells[0], {each.layout for each in question.cells}
    degrees = ("ulysses", "ring", "copies")
    if len(layouts) > 1 or any(len(getattr(request, name) or ()) > 1 for name in degrees):
        several = [name for name in degrees[1:] if len(getattr(request, name) or ()) > 1]
        words = words_of({"gpus": 1, "ulysses": 1, **dict.fromkeys(several, 1)})
        raise UsageError(
            "one trial runs in one layout, several are named", hint=f"use `{' '.join(words)}`"
        )
    depth, layers = request.attention_depth, model.shape.layers
    spec = question.trial(cell, length_tokens).replace(attention_depth=depth)
    if depth is not None and spec.settings.attention == "block_sparse":
        raise UsageError(_NOT_IN_PIECES, hint="leave `--attention-depth` out")
    if depth is not None and depth >= layers:
        raise UsageError(
            f"an attention depth of {depth}: {model.name} has {layers} layers",
            hint="leave `--attention-depth` out to train in full",
        )
    tokens = spec.length_tokens * spec.sequences
    if depth is not None and spec.data is None and pieces(tokens, spec.device) is None:
        near = -(-spec.length_tokens // PUBLISHED_STEP_TOKENS) * PUBLISHED_STEP_TOKENS
        raise UsageError(
            f"{format_tokens(tokens)} tokens cannot be cut into equal pieces that take the same "
            f"memory",
            hint=f"use `--length {near}`",
        )
    return spec


def alone(request: Request, length_tokens: int) -> Request:
    """The request narrowed to one length, and to one of the settings that a search compares."""
    return request.replace(
        proof="full",
        attention_depth=None,
        start_length=length_tokens,
        max_length=length_tokens,
        gpus=request.gpus or (request.nodes,),
        loss=request.loss or "full",
        allocator=request.allocator or "native",
    )


def _has_room_on_the_cpu(request: Request, machine: Machine, length_tokens: int) -> bool:
    """True if a trial can run on the CPU, with its states in this machine's memory."""
    on_the_cpu = request.replace(device="cpu")
    try:
        spec = plan_trial(on_the_cpu, machine, length_tokens)
    except HighwaterError:
        return False
    states = device_state_bytes(load_model(request.model).shape, spec.settings, device="cpu")
    return states + PROCESS_BYTES <= machine.host_memory_total_bytes


def gpus_hint(request: Request, length_tokens: int) -> str:
    """Return the hint where no GPU is: start elsewhere, and predict how many GPUs it takes."""
    asked = f"{shlex.quote(request.model)} --gpus 1xH100-80GB --length {length_tokens}"
    return f"start it where GPUs are; `highwater predict {asked}` says how many it takes"


IN_HEAD_GROUPS = (
    *("granite", "llama", "ministral", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
)
"""Model types whose attention goes in head groups, and is predicted so."""


def _refuse_attention(request: Request, model: Model, device: Device) -> None:
    """Raise UsageError or ModelError for a proof, a sparse pattern or head groups that the model,
    the GPU or another setting rules out.
    """
    if request.attention_depth is not None:
        raise UsageError(
            "an attention depth is for one trial: a search chooses it", hint="use `--proof memory`"
        )
    if request.proof == "memory" and request.dry_run:
        raise UsageError(
            "`--proof memory` and `--dry-run` exclude each other: no simulated trial takes time",
            hint=_NO_PROOF,
        )
    if request.proof == "memory" and model.shape.layers < 2:
        raise UsageError(
            f"{model.name} has one layer: a memory-only trial would save nothing", hint=_NO_PROOF
        )
    if request.settings.attention == "block_sparse":
        if not model.shape.has_plain_attention:
            raise ModelError(
                f"{model.name} has layers with a window, sinks, capped scores or a state of their "
                "own, which block-sparse attention would take the place of",
                hint="leave `--attention` out",
            )
        if device == "cuda":
            refuse_without_kernel(request)
        if request.prediction == "trace":
            raise UsageError(
                "steps with block-sparse attention are not traced",
                hint="use `--prediction formula`",
            )
        if request.proof == "memory":
            raise UsageError(_NOT_IN_PIECES, hint=_NO_PROOF)
    groups, heads = request.settings.attention_head_groups, model.shape.kv_heads
    family = model.shape.model_type
    if groups > 1 and family not in IN_HEAD_GROUPS:
        raise ModelError(
            f"{model.name} is of the family {family}, whose attention does not go in head groups",
            hint="leave `--attention-head-groups` out",
        )
    if heads % groups:
        works = max(each for each in range(1, min(groups, heads) + 1) if heads % each == 0)
        raise UsageError(
            f"{groups} head groups, and {model.name} has {heads} key/value heads, which {groups} "
            "does not divide",
            hint=f"use `--attention-head-groups {works}`",
        )


def refuse_without_kernel(request: Request) -> None:
    """Raise UsageError for a pattern that FlexAttention does not compute on GPUs."""
    if request.settings.pattern_type == "block_top_k":
        raise UsageError(
            "block_top_k, which chooses keys by what is in them, has no kernel on GPUs",
            hint="use `--pattern-type dilated_sparse`, or `--device cpu`",
        )
    whole = -(-request.settings.block_size // SPARSE_KERNEL_BLOCK) * SPARSE_KERNEL_BLOCK
    if request.settings.block_size != whole:
        raise UsageError(
            f"blocks of {request.settings.block_size} tokens: on GPUs a block is a multiple of "
            f"{SPARSE_KERNEL_BLOCK}",
            hint=f"use `--block-size {whole}`",
        )


def _adapters_here(request: Request, model: Model) -> tuple[Request, tuple[str, ...]]:
    """The request with adapters on attention alone, where "all linear layers" would be routers or
    experts, too; and notes on this, and on a frozen model whose files are in MXFP4.
    """
    notes, shape = tuple[str, ...](), model.shape
    has_experts = any(run.kind.mlp.experts > 1 for run in shape.runs)
    if has_experts and request.settings.lora_targets == ALL_LINEAR:
        request = request.replace(lora_targets=",".join(ATTENTION))
        notes += ("adapters are on attention alone: routers and experts have none unless named",)
    if shape.model_type == "gpt_oss":
        size = format_bytes(2 * shape.parameters)
        notes += (f"the frozen model is in bf16, {size}, and not in MXFP4, as its files are",)
    return request, notes


def _refuse_experts(settings: Settings, model: Model, device: Device, trainer: TrainerName) -> None:
    """Raise ModelError for experts whose rows are no multiple of 16 bytes, as PyTorch needs, and
    UsageError for settings, or a trainer, with which experts cannot have adapters.
    """
    lora, numbers = settings.adapters, _ROW_BYTES // (4 if device == "cpu" else 2)
    for what, width in (
        ("expert's MLP", model.shape.intermediate_size),
        ("hidden states", model.shape.hidden_size),
    ):
        if model.shape.experts > 1 and width % numbers:
            raise ModelError(
                f"the {what} of {model.name} are {width} numbers wide, and products of experts "
                f"need a multiple of {numbers}",
                hint=f"use a model whose widths are multiples of {numbers}, for example "
                "`highwater predict Qwen3-30B-A3B --gpus 8xH100-80GB`",
            )
    if lora is None or not expert_targets(model.shape.model_type, lora):
        return
    if trainer != OURS:
        raise UsageError(
            f"adapters on experts of {model.name}, which are predicted for highwater's engine",
            hint=f"use `--lora-targets {','.join(ATTENTION)}`",
        )
    if settings.lora_merged:
        raise UsageError(
            f"adapters on experts of {model.name} are not merged here",
            hint="leave `--lora-merged` out: peft merges them into the model of your choice",
        )
    if lora.rank % numbers:
        raise UsageError(
            f"adapters of rank {lora.rank} on experts, whose products need a multiple of {numbers}",
            hint=f"use `--lora {-(-lora.rank // numbers) * numbers}`",
        )
