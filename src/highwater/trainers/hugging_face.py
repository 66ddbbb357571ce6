"""Hugging Face's Trainer: the memory of its training step in closed form; accelerate's scripts,
Axolotl, LLaMA-Factory and ms-swift train by the same step.

- Layers are checkpointed, and keep their input; with activations on the host, in pinned blocks that
  PyTorch rounds up to powers of two.
- The memory of a layer and of the loss is learned from traces of that very step
  (``tools/learn_hugging_face.py``; engine/tracer/transformers_step.py), by how it trains: adapters
  on a model in bfloat16 (``lora``) or in bitsandbytes' NF4, beside whose layers peft copies no
  input in float32 (``nf4``), parameters in float32 under autocast (``autocast``), or in bfloat16,
  as FSDP2 gathers them too (``bf16``); with Liger's kernels (our words: a chunked loss) or its
  loss alone, or without, where the loss holds the logits of all tokens in float32, several times.
- Windows take what they do with flash_attention_2: beside SDPA transformers makes a mask of
  length x length, which is said and not predicted.
- Gradients are whole, and are dropped after an update. On several GPUs FSDP2 shards the states;
  with as many copies as GPUs DDP has them, with buckets as large as all gradients.
- DeepSpeed, instead of FSDP and without autocast, has the model and adapters in bfloat16, and for
  each GPU's part float32 parameters, both moments, and bfloat16 gradients, reduced in buckets.

Sources: transformers 5.23, peft 0.21 (``tuners/lora/bnb.py``), accelerate 1.15, liger-kernel
0.8.5, bitsandbytes 0.50.2; ``Reducer`` in torch/csrc/distributed/c10d/reducer.cpp; stage3.py,
stage_1_and_2.py and partitioned_param_coordinator.py in deepspeed/runtime/zero of DeepSpeed 0.19.6.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from highwater.errors import UsageError
from highwater.memory.formula.constants import (
    CUBLAS_WORKSPACES_BYTES,
    LOSS,
    WORKSPACES,
    Footprint,
    Term,
    phase,
    present,
)
from highwater.memory.formula.formula import outside_terms_of
from highwater.memory.formula.layers import Step
from highwater.memory.formula.moments import MomentBytes, bytes_of, products
from highwater.memory.trainers import TrainerMemory
from highwater.model.held_bytes import (
    device_state_bytes,
    gradient_bytes,
    paged_bytes,
    trained_parameters,
)
from highwater.model.model import STATE_BYTES_PER_PARAMETER, ModelShape
from highwater.nouns.codec import Record, from_json
from highwater.nouns.objective import saved_in_layer
from highwater.nouns.settings import Allocator, Settings
from highwater.nouns.trainer import OF_OTHERS, TrainerTraits
from highwater.nouns.trial import TrialSpec

FILE = Path(__file__).with_name("hugging_face.json")
_ALIKE = {"mistral": "llama", "qwen2": "llama"}
"""Families whose layers take the same memory as another family's."""
_LEFT_ON_THE_GPU = 2
"""Layer inputs that stay on the GPU with activations on the host: the first layer's, which is the
embedding's output, and the one in use."""
_FILLED_SHARE: Mapping[Allocator, float] = {"expandable": 0.972, "native": 0.91}
"""Share of the allocator's memory that live tensors fill, from replayed traces of Llama-3.1-8B with
LoRA at 32,768 and 131,072 tokens."""
_WIDE, _NARROW = 4, 2
"""Bytes of a number that FSDP2 reduces (float32), and of one that it gathers (bfloat16)."""
_ZERO_LIVE = 1_000_000_000
"""Numbers that ZeRO-3 updates at once (``sub_group_size``), and that it gathers: each module
fetches parameters ahead until so many are alive (``stage3_max_live_parameters``)."""
_ZERO_NORM = 250_000_000
"""Numbers of a gradient whose norm is computed at once, in float64, on the way to host memory."""


class Moments(Record, frozen=True, kw_only=True):
    """What traces taught of Hugging Face's step: bytes of layers and of the loss by family."""

    kept: MomentBytes
    """Memory that a layer keeps until its backward pass."""
    moments: tuple[MomentBytes, ...]
    """Further memory during a layer's backward pass."""
    loss: tuple[MomentBytes, ...]
    """Further memory between the last layer's forward and backward pass."""


@cache
def _learned() -> Mapping[str, Mapping[str, Moments]]:
    return from_json(FILE.read_bytes(), dict[str, dict[str, Moments]])


def _moments_of(shape: ModelShape, settings: Settings, shards: int) -> Moments | None:
    """The moments learned for a family and this kind of training; None if none were."""
    family = _ALIKE.get(shape.model_type, shape.model_type)
    is_narrow = settings.parameters == "bf16" or settings.deepspeed != "none" or shards > 1
    whole = "bf16" if is_narrow else "autocast"
    # DeepSpeed makes adapters bfloat16, too, and has no autocast
    adapters = "lora" if settings.deepspeed == "none" else "lora-bf16"
    adapters = "nf4" if settings.lora_base == "nf4" else adapters
    training = whole if settings.lora is None else adapters
    variant = training if settings.holds_logits else f"{training} liger"
    own = _learned().get(variant, {}).get(family)
    if settings.liger == "all" or own is None:
        return own
    plain = _learned()[variant.removesuffix(" liger")][family]
    return plain.replace(loss=own.loss)


def of_loss(tokens: int, vocabulary: int, hidden: int, *, is_whole: bool) -> Mapping[str, int]:
    """Products of a loss's sizes, in elements: T tokens, V vocabulary, E hidden size; c tokens in a
    chunk of Liger's, a power of two at which a chunk has about T x E logits.
    """
    if is_whole:
        return {"T*V": tokens * vocabulary, "V*E": vocabulary * hidden}
    pieces = -(-vocabulary // hidden)
    piece = min(tokens, 1 << (-(-tokens // pieces) - 1).bit_length())
    return {"c*V": piece * vocabulary, "c*E": piece * hidden, "V*E": vocabulary * hidden}


def footprint(step: Step) -> Footprint:
    """Memory that Hugging Face's step most likely takes on the fullest GPU."""
    shape, settings, shards = step.shape, step.settings, step.layout.shard_degree
    learned = _moments_of(shape, settings, shards)
    assert learned is not None  # noqa: S101 -- refuse
    sizes, (run,) = dict(_sizes(step)), shape.runs
    kept = bytes_of(learned.kept, sizes)
    is_offloaded = settings.activations == "host"
    on_gpu = min(shape.layers, _LEFT_ON_THE_GPU) if is_offloaded else shape.layers
    held = _by_zero(step) if settings.deepspeed != "none" else _by_fsdp(step)
    always = (
        *held.always,
        Term(WORKSPACES, sum(CUBLAS_WORKSPACES_BYTES)),
        Term("ids", 2 * 8 * step.tokens),
    )
    at_the_loss, in_a_layer, at_the_embedding = held.gathered
    table = 0 if step.is_frozen else step.table_size
    of_table = (_NARROW if settings.parameters == "bf16" else _WIDE) * table
    layer = Term(
        "one layer going backward",
        # without the head's gradient, which has come
        max(bytes_of(moment, sizes | {"V*E": 0}) for moment in learned.moments),
    )
    of_head = sizes | {"V*E": round(sizes["V*E"] * held.reduced)}
    loss = max(bytes_of(moment, of_head) for moment in learned.loss)
    behind = table + (run.count - 1) * step.trained_of(run.kind)
    of_others = held.come * behind // trained_parameters(shape, settings)
    come_first = Term("gradients that have come", min(held.come, of_table // shards))
    # peft keeps the embedding's output, which has to have a gradient
    last = on_gpu if is_offloaded and step.is_frozen else 1
    in_layers = (
        ("backward of the last layer", on_gpu, come_first),
        ("backward of the first layer", last, Term("gradients that have come", of_others)),
        *((f"backward, {term.name}", min(on_gpu, left), term) for left, term in held.later),
    )
    phases = (
        phase(
            LOSS,
            *always,
            *at_the_loss,
            Term("kept by recompute", (1 if is_offloaded else on_gpu) * kept),
            Term("loss and logits", loss),
        ),
        *(
            phase(name, *always, *in_a_layer, term, Term("kept by recompute", left * kept), layer)
            for name, left, term in in_layers
        ),
        phase(
            "backward of the embedding",
            *always,
            *at_the_embedding,
            Term("gradients that have come", held.come),
            # only of a table tied to the head; a separate one's has come already
            Term("gradient of the embedding", of_table if shape.tied_embeddings else 0),
        ),
        *(phase("update", *always, each) for each in held.update),
    )
    host = shape.layers * (1 << (kept - 1).bit_length()) if is_offloaded else 0
    return Footprint(
        phases=phases,
        outside=outside_terms_of(step),
        host=present(
            Term("kept by recompute, pinned", step.layout.machine_gpus * host),
            Term("states", step.layout.machine_gpus * held.host),
        ),
        filled_share=_FILLED_SHARE[settings.allocator],
        cached_bytes=_cached_bytes(step),
    )


def _sizes(step: Step) -> Mapping[str, int]:
    """Products of sizes of the model's only kind of layers, and of its vocabulary, in elements."""
    shape, (run,) = step.shape, step.shape.runs
    rank, sizes = step.settings.lora or 0, (step.tokens, shape.vocab_size, shape.hidden_size)
    return {
        **products(
            run.kind, tokens=step.tokens, attended_key=run.kind.attention.key_size, tile=None
        ),
        **of_loss(*sizes, is_whole=step.settings.holds_logits),
        "T*r": step.tokens * rank,
        "L": run.count * run.kind.matmul_parameters,
    }


def _cached_bytes(step: Step) -> int:
    """Bytes that the allocator keeps until it runs out: bfloat16 logits, whose block no other
    tensor fills, and blocks of freed activations, as many bytes as the gradients that FSDP2 reduces
    on its own stream. Source: 16 steps in docs/results/other_trainers/step_cells.json.
    """
    logits = _NARROW * step.tokens * step.shape.vocab_size if step.settings.holds_logits else 0
    is_summed = step.layout.shard_degree > 1 and step.settings.deepspeed == "none"
    return logits + (_gradients(step) if is_summed else 0)


def _gradients(step: Step) -> int:
    """Bytes of one GPU's shard of the gradients, in the parameters' dtype."""
    shards = step.layout.shard_degree
    return gradient_bytes(step.shape, step.settings, shards=shards) // shards


class _SharedStates(NamedTuple):
    """Memory of shared states (FSDP2, DDP, ZeRO) on a GPU, without layers, logits and the loss."""

    always: tuple[Term, ...]
    gathered: tuple[tuple[Term, ...], ...]
    """Terms at the loss, during a layer's backward pass, and at the embedding's."""
    come: int = 0
    """Bytes of the gradients that are allocated during the backward pass."""
    reduced: float = 1.0
    """Size of the head's gradient while it is reduced, as a multiple of itself."""
    later: tuple[tuple[int, Term], ...] = ()
    """Further terms of a layer's backward pass, each with the number of layers left then."""
    update: tuple[Term, ...] = ()
    """Terms of the update, if it takes memory."""
    host: int = 0
    """Bytes of states in host memory per GPU."""


def _by_fsdp(step: Step) -> _SharedStates:
    """States sharded by FSDP2, with gathered units (the head at the loss, two layers in a layer,
    the embedding at the end) and the gradient in reduction; or unsharded, with DDP's buckets.
    """
    shape, settings, shards = step.shape, step.settings, step.layout.shard_degree
    states = device_state_bytes(shape, settings, device=step.device, shards=shards) // shards
    gradients = _gradients(step)
    come = 0 if settings.keeps_gradients else gradients
    buckets = gradients if step.layout.gpus > shards == 1 else 0
    paged = paged_bytes(shape, settings)
    always = (Term("states", states - come - paged), Term("DDP's buckets", buckets))
    if shards == 1:
        is_8_bits = settings.paged and settings.optimizer_traits.is_quantized
        # transformers' Trainer keeps an embedding's moments in 32 bits
        wider = 6 * step.table_size if is_8_bits and not step.is_frozen else 0
        return _SharedStates(always, ((), (), ()), come, host=paged + wider)
    (run,), saved = shape.runs, 0
    if settings.adapters is not None:
        saved = saved_in_layer(run.kind, shape.model_type, settings.adapters, element=_NARROW)
    table = Term("embedding or head, gathered", _NARROW * step.table_size)
    layers = (
        Term("layers, gathered", 2 * (_NARROW * run.kind.parameters - saved)),
        Term("gradient reduction", _WIDE * step.trained_of(run.kind)),
    )
    whole = 0 if step.is_frozen else step.table_size
    return _SharedStates(
        always, ((table,), layers, (table, Term("gradient reduction", _WIDE * whole))), come
    )


def _by_zero(step: Step) -> _SharedStates:
    """States sharded by DeepSpeed's ZeRO-2, with unsharded parameters, or ZeRO-3, which gathers
    them; with offload, the optimizer, or also the parameters, are in host memory.
    """
    shape, settings, shards = step.shape, step.settings, step.layout.shard_degree
    kind, is_cut = shape.runs[0].kind, settings.deepspeed.startswith("zero3")
    is_on_host = "offload" in settings.deepspeed
    trained = trained_parameters(shape, settings)
    part = -(-trained // shards)
    frozen = device_state_bytes(shape, settings, device=step.device)
    own = _NARROW * trained + frozen - STATE_BYTES_PER_PARAMETER * trained
    own //= shards if is_cut else 1
    is_away, table = settings.deepspeed == "zero3-offload", 0 if step.is_frozen else step.table_size
    widest = max(each.rows * each.row_size for each in kind.matrices)
    bucket = settings.deepspeed_bucket or shape.hidden_size**2
    gradients = 0 if is_on_host else _NARROW * part
    staged = max(table, widest) if is_on_host and not is_cut and not step.is_frozen else 0
    always = (
        Term("parameters", 0 if is_away else own),
        Term("float32 parameters and moments", 0 if is_on_host else 12 * part),
        # ZeRO-2 has only the gradients of earlier micro-batches
        Term("gradients", gradients * (is_cut or settings.accumulates)),
        Term("bucket of gradients", _NARROW * (bucket + staged)),
    )
    # a gradient's piece on its way to the host, with a float64 copy for its norm
    piece = (_NARROW * table + 8 * min(table, _ZERO_NORM * shards)) / shards if is_on_host else 0
    copied = _NARROW * table if is_cut else 0
    reduced = 1 + (copied + piece) / (_NARROW * step.table_size)
    held = shape.tied_embeddings * _NARROW * table
    # flat gradients in float32; ZeRO-2 also has this micro-batch's, or has added them
    update = _WIDE * part + gradients * (1 if settings.accumulates else 2)
    if is_cut:
        update = (_NARROW + _WIDE) * min(part, _ZERO_LIVE)
    pinned = (_WIDE, _NARROW, *((_NARROW,) if is_away else ()))
    if not is_cut:
        pinned = (_WIDE, _WIDE, *(_NARROW,) * (1 + settings.accumulates))
    ordinary = (12 if is_cut else 8) * part + is_away * (own - _NARROW * trained // shards)
    blocks = sum(1 << (each * part - 1).bit_length() for each in pinned)
    ready, tables, later = _gathered(step, bucket, widest) if is_cut else (0, 0, ())
    come = Term("gradients of this micro-batch", 0 if is_cut else gradients)
    gathered = Term("parameters, gathered", _NARROW * ready)
    layer = (Term("gradient of the head, until the embedding's", held), gathered, come)
    whole = Term("embedding and head, gathered", _NARROW * tables)
    of_embedding = Term("gradient reduction", round(_NARROW * table - held + copied + piece))
    return _SharedStates(
        always,
        ((gathered,), layer, (whole, of_embedding, come)),
        reduced=reduced,
        later=later,
        update=(Term("gradients in both forms", 0 if is_on_host else update),),
        host=ordinary + blocks if is_on_host else 0,
    )


def _gathered(
    step: Step, bucket: int, widest: int
) -> tuple[int, int, tuple[tuple[int, Term], ...]]:
    """Elements that ZeRO-3 has gathered in a layer, and at the loss; elements of the tables at the
    embedding; and the later terms. A gradient's copy for reduction replaces its matrix, which is
    released by then; a bucket of several gradients takes as much again.
    """
    shape, kind = step.shape, step.shape.runs[0].kind
    everything = shape.parameters + step.is_frozen * trained_parameters(shape, step.settings)
    # a fused loss reads the head outside its module, so that it stays until the next step
    head = 0 if step.settings.holds_logits else step.table_size
    is_one = shape.tied_embeddings and head > 0
    # the last matrix that is fetched ahead goes beyond the limit
    ready = min(everything, max(_ZERO_LIVE + widest, head + kind.parameters))
    again = 0 if is_one or head >= _ZERO_LIVE else min(step.table_size, everything - ready)
    left = 1 + max(0, _ZERO_LIVE - head) // kind.parameters
    full = shape.layers - bucket // kind.parameters
    copied = 0 if step.is_frozen or bucket <= widest or full <= 0 else bucket
    fetched = Term("embedding fetched again", _NARROW * again)
    later = ((left, fetched), (full, Term("a full bucket reduced", _NARROW * copied)))
    tables = step.table_size + (0 if is_one else head)
    return ready, tables, tuple(each for each in later if each[1].bytes)


def refuse(spec: TrialSpec, shape: ModelShape) -> None:
    """Raise UsageError for layers without learned moments, and for unpredicted settings."""
    settings, layout = spec.settings, spec.layout
    if len(shape.runs) != 1 or _moments_of(shape, settings, layout.shard_degree) is None:
        known = sorted({*_ALIKE, *(name for rows in _learned().values() for name in rows)})
        raise UsageError(
            f"Hugging Face's step was not traced with layers of {shape.model_type}, trained so; "
            f"known are {', '.join(known)}",
            hint="use `--trainer trl` without a file, whose step is predicted, leave `--trainer` "
            "out for this package's engine, or measure it: `highwater find --trainer accelerate`",
        )
    if layout.context_degree > 1:
        raise UsageError(
            "Hugging Face's Trainer is not predicted with shared sequences",
            hint="leave `--ulysses` and `--ring` out",
        )
    if settings.deepspeed != "none" and layout.replicate_degree > 1:
        raise UsageError(
            "DeepSpeed's ZeRO shares states among all GPUs: there are no copies",
            hint="leave `--copies` or `--deepspeed` out",
        )
    if settings.liger == "loss" and settings.holds_logits:
        raise UsageError(
            "Liger's loss alone, and a full loss, which has none of Liger's kernels",
            hint="add `--loss chunked`, or leave `--liger` out",
        )
    if settings.paged and layout.shard_degree > 1:
        raise UsageError(
            "bitsandbytes' paged optimizers know no shards of FSDP2",
            hint=f"use `--copies {layout.gpus}`, or leave `--paged` out",
        )
    if settings.recompute != "layer":
        raise UsageError(
            "Hugging Face's Trainer is predicted with checkpointed layers alone",
            hint="leave `--recompute` out",
        )


PREDICTED = TrainerTraits(
    step="the step that Hugging Face's Trainer composes",
    is_run=False,
    settings=frozenset(
        (
            *("allocator", "loss", "activations", "optimizer", "parameters", "copies"),
            *("lora", "lora_alpha", "lora_targets", "lora_base", "sequences_per_micro_batch"),
            *("micro_batches", *OF_OTHERS),
            *("rope", "headroom", "start_length", "resolution", "max_length"),
        )
    ),
    traces="made",
    ring_objectives=frozenset(),
    loads_as_saved=True,
)
MEMORY = TrainerMemory(
    formula=footprint,
    accuracy="in closed form, learned from traces of transformers' own step with SDPA and peft; a "
    "chunked loss is Liger's. 21 steps of its Trainer on H200s, 16 of which set it right, were "
    "within 1.7 %; traces (`--exact`, one GPU) equal; DeepSpeed by its source, and thirteen steps "
    "on H200s, nine of which set it right, within 2 % (docs/results/other_trainers)",
    of_adapters="of a model in NF4 4 % less than the one such step that was measured",
    refuse=refuse,
)
