"""Plan: a request made into a question that this machine can be asked. Pure: nothing is started, nothing is written."""

import shlex
from itertools import product
from pathlib import Path

import msgspec

from highwater.errors import MachineError, ModelError, UsageError
from highwater.spec.codec import Noun
from highwater.spec.families import value_of
from highwater.spec.footprint import PROCESS_BYTES, host_state_bytes, staged_gradient_bytes
from highwater.spec.hardware import CPU_FLAGS, CPU_SEARCH, Gpu, Machine
from highwater.spec.hyperparameters import NAMES as HYPERPARAMETERS
from highwater.spec.hyperparameters import Hyperparameters
from highwater.spec.ladder import default_ladder
from highwater.spec.layout import Layout
from highwater.spec.model import STATE_BYTES_PER_PARAMETER, Model, ModelShape, load_model, read_config, window_tokens
from highwater.spec.pieces import pieces
from highwater.spec.request import Request
from highwater.spec.rope import WITHOUT_YARN_IN_FILES, ends_at_native, unscalable, yarn
from highwater.spec.settings import Rope, Settings
from highwater.spec.study import PUBLISHED_STEP_TOKENS, Cell, Grid, Question, counted_ranks
from highwater.spec.trial import Device, TrialSpec
from highwater.spec.weight_files import SCORE, saved_tensors, weight_files
from highwater.units import GIB, MIB, format_bytes, format_tokens

ON_THE_CPU_NOTE = "no GPU is visible: trials run on the CPU, as with `--device cpu`"
_NAMED_SETTINGS = (
    "strategy",
    "offload",
    "objective",
    "critic",
    "entropy",
    "checkpoint",
    "save_hf",
    "recompute",
    "mlp_tiles",
    "rope",
    "sequences_per_micro_batch",
    "token_budget_tokens",
)
"""Fields that a request and the settings share: the same on every rung."""
_PROCESSES_PER_CORE = 4
"""More than this many processes for each core, and a trial on the CPU would spend its time waiting."""
_ROW_BYTES = 16
"""A row of a grouped product's operands is a multiple of so many bytes. Source: ``torch._grouped_mm``."""
_NO_PROOF = "leave `--proof` out"
_CEILING_TOKENS: dict[Device, int] = {"cuda": 1024**2, "cpu": 8192}
"""Longest length to try unless the user names one. On the CPU, where attention's square is felt, a search has to end."""


class Plan(Noun, frozen=True, kw_only=True):
    """What will be asked, and what the user should know before it starts."""

    question: Question
    notes: tuple[str, ...] = ()


def plan(request: Request, machine: Machine, *, in_windows: bool = False) -> Plan:
    """The question that a request asks of a machine; ``in_windows``: of a trainer whose attention has sliding windows.

    Raises ModelError, UsageError or MachineError for what cannot be asked, before anything starts.
    """
    model = load_model(request.model)
    device: Device = request.device or ("cuda" if machine.gpus else "cpu")
    _check_proof(request, model)
    _refuse_ragged_experts(model, device)
    is_fallback = request.device is None and device == "cpu"
    if is_fallback:
        _refuse_what_needs_a_gpu(request, machine, model)
    counts = _gpu_counts(request, machine, device, model)
    gpus = used_gpus(machine, device=device, count=max(counts))
    total_bytes = min((gpu.memory_total_bytes for gpu in gpus), default=None)
    _check_memory(request, machine, device, model, workers=max(counts), total_bytes=total_bytes)
    # Of a user's data only the documents have to be within a window, and their lengths are known when they come.
    window = None if in_windows or request.data is not None else window_tokens(model)
    grid, capped = _grid(request, model, device, window)
    _check_yarn(request, model, grid.max_tokens)
    cells, skipped = _cells(request, model.shape, device, counts)
    cells, too_small = _within_token_budget(cells, grid, device)
    if device == "cuda" and not request.dry_run:
        _check_host_memory(machine, model, cells)
    question = Question(
        model=model,
        device=device,
        device_name="CPU" if device == "cpu" else _device_name(gpus),
        device_total_bytes=total_bytes,
        memory_budget_bytes=request.memory_bytes,
        cells=cells,
        grid=grid,
        method=request.method,
        confirm=request.confirm,
        margin_bytes=request.margin_bytes,
        steps=request.steps,
        micro_batches=request.micro_batches,
        hyperparameters=Hyperparameters(**{name: getattr(request, name) for name in HYPERPARAMETERS}),
        data=request.data,
        simulated=request.dry_run,
        proof=request.proof,
        timeout_s=request.timeout_s if request.proof == "memory" else None,
    )
    question.trial(cells[0], grid.start_tokens)  # raises for what a trial cannot be
    fallback = (ON_THE_CPU_NOTE,) if is_fallback else ()
    of_weights = weights_notes(model, cells[0].settings, simulated=request.dry_run)
    notes = (*fallback, *skipped, *too_small, *capped, *offload_notes(cells[0].settings, device), *of_weights)
    return Plan(question=question, notes=notes)


def offload_notes(settings: Settings, device: Device) -> tuple[str, ...]:
    """What offload does not do here, for who would expect it; nothing where it does all."""
    if not settings.offload:
        return ()
    if device == "cpu":
        return ("on the CPU offload changes nothing: states are in host memory in any case",)
    if settings.strategy == "fsdp":
        return (
            "FSDP1 offloads parameters and optimizer states; a gradient, 4 bytes a parameter over all GPUs, stays on them until "
            "each backward pass ends; `--strategy fsdp2` offloads that too",
        )
    return ()


def plan_trial(request: Request, machine: Machine, length_tokens: int) -> TrialSpec:
    """One trial of a request: the cheapest rung, unless the request names one; one GPU, unless it names a count.

    Raises what ``plan`` raises, and UsageError when the request names several layouts.
    """
    if length_tokens < 2:
        raise UsageError("a length of 1 token", hint="use `--length 2` or more: one to read, one to predict")
    model = load_model(request.model)
    if request.data is None:
        refuse_past_window(model, length_tokens, flag="--length")
    _refuse_past_native(model, request.rope, length_tokens, flag="--length")
    alone = msgspec.structs.replace(
        request,
        proof="full",
        attention_depth=None,
        start_length=length_tokens,
        max_length=length_tokens,
        gpus=request.gpus or (1,),
        loss=request.loss or "full",
        allocator=request.allocator or "native",
    )
    question = plan(alone, machine).question
    cell, *others = question.cells
    if others:
        raise UsageError("one trial runs in one layout, several are named", hint="use `--gpus 1 --ulysses 1`")
    spec = msgspec.structs.replace(question.trial(cell, length_tokens), attention_depth=request.attention_depth)
    _check_depth(spec, question.model)
    return spec


def weights_notes(model: Model, settings: Settings, *, simulated: bool = False) -> tuple[str, ...]:
    """What a trial does not start from weights that are here; nothing of a simulated one, but what time would be of experts."""
    directory = Path(model.directory)
    if not weight_files(directory):
        random = f"random weights: {model.name} has none here"
        if model.shape.experts > 1:
            return (
                f"{random}, and random ones send the tokens to its {model.shape.experts} experts nearly evenly: time may differ "
                "with trained ones, memory does not (every token goes to as many experts, whichever they are)",
            )
        return () if simulated else (f"{random}; memory and time are those of trained ones, the loss is not",)
    notes: list[str] = []
    tensors = saved_tensors(directory)
    if tensors and SCORE not in tensors and (settings.critic or settings.objective == "rw") and not simulated:
        notes.append(f"random weights in the head that gives one number a token: the files of {model.name} have no {SCORE}")
    if not model.shape.tied_embeddings and value_of(read_config(directory / "config.json"), "tie_word_embeddings"):
        notes.append(
            f"the head of {model.name} is trained apart from the embedding, though its config.json ties them: its files hold both, "
            "with different values, and transformers does the same"
        )
    return tuple(notes)


def used_gpus(machine: Machine, *, device: Device, count: int) -> tuple[Gpu, ...]:
    """The GPUs that trials on ``count`` GPUs run on: the first ones that are visible."""
    return machine.gpus[:count] if device == "cuda" else ()


def _check_proof(request: Request, model: Model) -> None:
    """Raise UsageError for what a search cannot prove in that way."""
    if request.attention_depth is not None:
        raise UsageError("an attention depth is for one trial: a search chooses it", hint="use `--proof memory`")
    if request.proof == "memory" and request.dry_run:
        raise UsageError("`--proof memory` and `--dry-run` exclude each other: no simulated trial takes time", hint=_NO_PROOF)
    if request.proof == "memory" and model.shape.layers < 2:
        raise UsageError(f"{model.name} has one layer: a memory-only trial would save nothing", hint=_NO_PROOF)


def _check_depth(spec: TrialSpec, model: Model) -> None:
    """Raise UsageError for a memory-only trial that would be a full one."""
    depth, layers = spec.attention_depth, model.shape.layers
    if depth is None:
        return
    if depth >= layers:
        raise UsageError(
            f"an attention depth of {depth}: {model.name} has {layers} layers",
            hint="leave `--attention-depth` out to train in full",
        )
    tokens = spec.length_tokens * spec.sequences
    if spec.data is None and pieces(tokens, spec.device) is None:
        near = -(-spec.length_tokens // PUBLISHED_STEP_TOKENS) * PUBLISHED_STEP_TOKENS
        raise UsageError(
            f"{format_tokens(tokens)} tokens cannot be cut into equal pieces that take the same memory",
            hint=f"use `--length {near}`",
        )


def _refuse_ragged_experts(model: Model, device: Device) -> None:
    """Raise ModelError for experts whose grouped product PyTorch does not compute: it wants rows of a multiple of 16 bytes."""
    numbers = _ROW_BYTES // (4 if device == "cpu" else 2)
    for what, width in (("expert's MLP", model.shape.intermediate_size), ("hidden states", model.shape.hidden_size)):
        if model.shape.experts > 1 and width % numbers:
            raise ModelError(
                f"the {what} of {model.name} are {width} numbers wide, and products of experts need a multiple of {numbers}",
                hint=f"use a model whose widths are multiples of {numbers}, for example `highwater find Qwen3-30B-A3B --dry-run`",
            )


def _refuse_what_needs_a_gpu(request: Request, machine: Machine, model: Model) -> None:
    """Raise MachineError for what is meant for GPUs, named or not: it must not quietly become a question to the CPU."""
    workers, budget = max(request.gpus or (1,)), request.memory_bytes
    if workers > 1:
        meant = f"{workers} GPUs are asked for"
    elif budget is not None and budget > machine.host_memory_total_bytes:
        meant = f"{format_bytes(budget)} is more than this machine's memory, {format_bytes(machine.host_memory_total_bytes)}"
    else:
        return
    memory = "" if budget is not None else " --memory 80GiB"
    raise MachineError(
        f"no GPU is visible, and {meant}",
        hint=f"add `--device cuda{memory} --dry-run` to train nothing; `{_cpu_search(request, model)}` searches on the CPU",
    )


def _cpu_search(request: Request, model: Model) -> str:
    """A search on the CPU that can be answered: of the model that is asked about, where its states leave room, or of a tiny one."""
    if model.shape.parameters * STATE_BYTES_PER_PARAMETER > GIB // 2:
        return CPU_SEARCH
    return f"highwater find {shlex.quote(request.model)} {CPU_FLAGS}"


def _gpu_counts(request: Request, machine: Machine, device: Device, model: Model) -> tuple[int, ...]:
    present = len(machine.gpus)
    if device == "cpu" or request.dry_run:
        counts = tuple(dict.fromkeys(request.gpus or (1,)))
        most = machine.cpu_cores * _PROCESSES_PER_CORE
        if max(counts) > most and not request.dry_run:
            raise MachineError(
                f"{max(counts)} processes are too many for {machine.cpu_cores} CPU cores", hint=f"use `--gpus {most}` or fewer"
            )
        return counts
    if not present:
        raise MachineError("the driver shows no GPU here", hint=f"`{_cpu_search(request, model)}` searches on the CPU")
    powers = tuple(2**exponent for exponent in range(present.bit_length()))
    counts = tuple(dict.fromkeys(request.gpus or powers))
    if max(counts) > present:
        works = " ".join(str(count) for count in counts if count <= present) or str(present)
        raise MachineError(
            f"{max(counts)} GPUs are asked for, and {present} {'is' if present == 1 else 'are'} present",
            hint=f"use `--gpus {works}`",
        )
    return counts


def _check_memory(
    request: Request, machine: Machine, device: Device, model: Model, *, workers: int, total_bytes: int | None
) -> None:
    budget = request.memory_bytes
    if budget is None and total_bytes is None:
        if device == "cuda":
            raise UsageError("a dry run without a GPU needs a memory limit", hint="add `--memory 80GiB`")
        unseen = "no GPU is visible, and " if request.device is None else ""
        raise UsageError(f"{unseen}a search on the CPU needs a memory limit", hint=f"for example `{_cpu_search(request, model)}`")
    if budget is not None and total_bytes is not None and budget > total_bytes:
        raise UsageError(
            f"--memory {format_bytes(budget)} is more than the GPU has, {format_bytes(total_bytes)}",
            hint="leave `--memory` out to use the whole card",
        )
    if device == "cpu" and budget is not None and not request.dry_run and budget * workers > machine.host_memory_total_bytes:
        present = machine.host_memory_total_bytes
        raise MachineError(
            f"{workers} x {format_bytes(budget)} is more than this machine's memory, {format_bytes(present)}",
            hint=f"use `--memory {max(1, present // workers // MIB)}MiB`",
        )
    limit = budget or total_bytes or 0
    if request.margin_bytes >= limit:
        raise UsageError(
            f"a margin of {format_bytes(request.margin_bytes)} leaves nothing of {format_bytes(limit)}",
            hint="use a smaller `--margin`, or leave it out",
        )


def _check_host_memory(machine: Machine, model: Model, cells: tuple[Cell, ...]) -> None:
    """Raise MachineError when what is kept in host memory does not fit into this machine's, beside the processes that train."""
    for cell in cells:
        gpus, settings = cell.layout.gpus, cell.settings
        states = host_state_bytes(model.shape, settings, gpus=gpus) + staged_gradient_bytes(model.shape, settings, gpus=gpus)
        processes = gpus * PROCESS_BYTES
        if states and states + processes > machine.host_memory_total_bytes:
            what = "offloaded states" if settings.offload else "the reference"
            raise MachineError(
                f"{what} of {model.name} on {counted_ranks(gpus, 'cuda')} take {format_bytes(states)} of host memory, "
                f"the processes {format_bytes(processes)}, and this machine has {format_bytes(machine.host_memory_total_bytes)}",
                hint="leave `--offload` out" if settings.offload else "use `--objective ppo`, which has no reference",
            )


def _device_name(gpus: tuple[Gpu, ...]) -> str:
    names = list(dict.fromkeys(gpu.name for gpu in gpus))
    if len(names) > 1:
        same = ",".join(str(gpu.index) for gpu in gpus if gpu.name == names[0])
        raise UsageError(
            f"these GPUs are of different kinds: {', '.join(names)}", hint=f"`CUDA_VISIBLE_DEVICES={same}` keeps the {names[0]}"
        )
    return names[0] if names else "simulated GPU"


def _cells(
    request: Request, shape: ModelShape, device: Device, counts: tuple[int, ...]
) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """Every layout that can work, on every rung; and a note for each pair of degrees that is skipped."""
    if device == "cpu" and request.allocator == "expandable":
        raise UsageError("`--device cpu` and `--allocator expandable` exclude each other", hint="leave `--allocator` out")
    named = Settings(**{name: getattr(request, name) for name in _NAMED_SETTINGS})
    rungs = default_ladder(device=device, base=named, allocator=request.allocator, loss=request.loss)
    layouts: list[Layout] = []
    skipped: list[tuple[str, str]] = []
    for gpus, degree in product(counts, dict.fromkeys(request.ulysses)):
        obstacle = ulysses_obstacle(shape, gpus=gpus, degree=degree, device=device)
        if obstacle is None:
            layouts.append(Layout(gpus=gpus, ulysses_degree=degree))
        else:
            skipped.append((f"SP={degree} on {counted_ranks(gpus, device)}", obstacle))
    if not layouts:
        works = _degrees(shape, counts, device)
        raise UsageError("; ".join(f"{what}: {why}" for what, why in skipped), hint=f"use {works}")
    cells = tuple(Cell(layout=layout, settings=rung) for layout, rung in product(layouts, rungs))
    return cells, tuple(f"{what} is skipped: {why}" for what, why in skipped)


def _degrees(shape: ModelShape, counts: tuple[int, ...], device: Device) -> str:
    """Every degree that some of these counts of GPUs can share a sequence by, as flags."""
    works = [
        f"`--ulysses {degree}`"
        for degree in range(1, min(max(counts), shape.query_heads) + 1)
        if any(ulysses_obstacle(shape, gpus=gpus, degree=degree, device=device) is None for gpus in counts)
    ]
    return works[0] if len(works) == 1 else f"{', '.join(works[:-1])} or {works[-1]}"


def _within_token_budget(cells: tuple[Cell, ...], grid: Grid, device: Device) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """The cells whose token budget holds a sequence of the start length, and a note for each that does not; all where none does."""
    kept = [cell for cell in cells if cell.settings.sequences(grid.start_tokens, context_degree=cell.layout.context_degree)]
    if not kept:
        return cells, ()
    skipped = [cell.label_on(device) for cell in cells if cell not in kept]
    why = f"is skipped: its token budget does not hold a sequence of {format_tokens(grid.start_tokens)} tokens"
    return tuple(kept), tuple(f"{label} {why}" for label in skipped)


def ulysses_obstacle(shape: ModelShape, *, gpus: int, degree: int, device: Device = "cuda") -> str | None:
    """Why this many GPUs cannot share a sequence by heads, in words; None when they can."""
    if gpus % degree:
        return f"{degree} does not divide {counted_ranks(gpus, device)}"
    if shape.query_heads % degree:
        return f"{degree} does not divide the model's {shape.query_heads} query heads"
    if shape.kv_heads % degree and degree % shape.kv_heads:
        return f"{degree} and the model's {shape.kv_heads} key/value heads do not divide each other"
    return None


def refuse_past_window(model: Model, length_tokens: int, *, flag: str) -> None:
    """Raise UsageError for a document that the model's sliding window does not hold; ``flag`` is where its length was named."""
    window = window_tokens(model)
    if window is not None and length_tokens > window:
        raise UsageError(
            f"{format_tokens(length_tokens)} tokens are past the sliding window of {format_tokens(window)} in which {model.name} "
            "attends; only full attention is supported",
            hint=f"use `{flag} {window}` or fewer tokens",
        )


def _grid(request: Request, model: Model, device: Device, window: int | None) -> tuple[Grid, tuple[str, ...]]:
    """The lengths to try. They end at the native length where nothing scales the positions past it, and at a sliding window."""
    native = model.shape.native_length_tokens
    longest, notes = request.max_tokens or _CEILING_TOKENS[device], ()
    if request.max_tokens is None and device == "cpu":
        longest = max(longest, request.start_tokens)
        notes = (f"on the CPU lengths end at {format_tokens(longest)}; `--max-length` names another end",)
    if longest > native and ends_at_native(model, request.rope):
        _refuse_past_native(model, request.rope, request.start_tokens, flag="--start-length")
        longest = native
        why = f"{model.name}'s own RoPE scaling does; `--rope yarn` goes past it"
        if unscalable(model) is not None:
            why = f"{model.name} was made for them, and {unscalable(model)}"
        notes = (f"lengths end at {format_tokens(native)}: {why}",)
    if window is not None and longest > window:
        refuse_past_window(model, request.start_tokens, flag="--start-length")
        refuse_past_window(model, request.max_tokens or 0, flag="--max-length")
        longest = window
        notes = (
            f"lengths end at {format_tokens(window)}: {model.name} attends in a sliding window of as many tokens, and only full "
            "attention is supported",
        )
    grid = Grid(
        start_tokens=request.start_tokens,
        step_tokens=request.resolution_tokens or PUBLISHED_STEP_TOKENS,
        native_length_tokens=native,
        beyond_step_tokens=request.resolution_tokens or max(1, native // 4),
        max_tokens=longest,
    )
    return grid, notes


def _check_yarn(request: Request, model: Model, longest_tokens: int) -> None:
    """Raise UsageError where YaRN is asked for and cannot be, or where what is saved with it could not be loaded."""
    obstacle = unscalable(model)
    if request.rope == "yarn" and model.own_rope_scaling and obstacle is not None:
        raise UsageError(f"`--rope yarn` cannot replace {model.name}'s own scaling: {obstacle}", hint="leave `--rope` out")
    is_saved = request.save_hf != "never" and model.shape.model_type in WITHOUT_YARN_IN_FILES
    if is_saved and yarn(model, length_tokens=longest_tokens, rope=request.rope) is not None:
        raise UsageError(
            f"{model.shape.model_type} in transformers takes no YaRN from its config: what is saved of {model.name} with "
            "it could not be loaded",
            hint="leave `--save-hf` out",
        )


def _refuse_past_native(model: Model, rope: Rope, length_tokens: int, *, flag: str) -> None:
    native = model.shape.native_length_tokens
    if length_tokens <= native or not ends_at_native(model, rope):
        return
    length, longest = format_tokens(length_tokens), format_tokens(native)
    if unscalable(model) is not None:
        raise UsageError(
            f"{length} tokens are past the {longest} that {model.name} was made for, and {unscalable(model)}",
            hint=f"use `{flag} {native}`",
        )
    raise UsageError(
        f"{model.name} scales its own RoPE up to {longest} tokens: {length} is past it",
        hint=f"add `--rope yarn` to scale by YaRN instead, or stay at {native} or below",
    )
