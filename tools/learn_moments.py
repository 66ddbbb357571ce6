"""Learn what a layer of a family takes at the moments that may be its peak, from traces, and write
``memory/formula/moments.json``:

    python -P tools/learn_moments.py [FAMILY...]

Small models of random sizes are traced; they allocate and free the same things in the same order.
So what is alive at each event is a sum of products of sizes, each a whole number of times, which
linear equations give. Kept are the moments that are the largest for some sizes as models have them.
Takes minutes; without families those that are in the file are learned again.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = (str(TESTS / "numeric"), str(TESTS))

from traces import trace

from highwater.memory.formula.constants import WORKSPACES
from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.formula.moments import (
    DENSE,
    FILE,
    SHARED,
    bytes_of_sums,
    columns,
    kind_name,
    products,
    score_products,
)
from highwater.model.families import EXPERT_COUNTS, EXPERTS_PER_TOKEN, family_row
from highwater.model.layer_kind import AttentionKind, LayerKind, MlpKind, slides
from highwater.model.model import load_model
from highwater.nouns.events import (
    RESIDENT_THREADS,
    Allocate,
    Enter,
    EventLog,
    Free,
    GiveBack,
    TraceOrder,
    column_sums,
)
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from highwater.trials.traced import fullest_rank
from trial_specs import trial_of

LAYERS = 2
MORE = 4
"""Traces more than there are products of sizes: as many equations are left over, and have to hold.
"""
MOST_SAMPLES = 80
UNEVEN = ("inside aten.sum.dim_IntList",)
"""Operators whose memory is no product of sizes: sums over tokens by rows."""
TILES = 2
RANDOM_SHAPES = 20_000
"""Shapes among which a moment has to be the largest of one to be kept."""


PARTS = ("one layer going backward", "kept by recompute", "activations of all layers", WORKSPACES)
"""Terms of the formula that are a layer's, or no tensor's."""
SHARED_SIZE = ("aria_text", "gpt_neox", "helium", "jais2", "opt", "persimmon", "phimoe")
"""Families whose heads share the hidden size."""
UNGROUPED = ("gpt_neox", "opt", "persimmon")
"""Families whose every query head has keys of its own."""
CAP = 50.0
"""Of scores, where they are capped; its value is no matter."""
ROWS = ("one", "D", "E", "F", "Q", "K", "X", "X*E", "X*F")
"""Products that a trace has and the formula leaves out: rows of weights, biases, partial sums."""
BIASED = ("glm", "glm4", "gpt_neox", "jais2", "opt", "persimmon", "seed_oss", "starcoder2")
"""Families whose matrices have biases, of as many numbers as a matrix has rows."""
ONE_ATTENTION = (
    "dots1",
    "granitemoe_swa",
    "laguna",
    "mellum",
    "olmoe",
    "phimoe",
    "starcoder2",
)
"""Families whose layers with a window count as those without: they differ in what the kernel of
attention takes for a head."""
OWN: Mapping[str, Mapping[str, Any]] = {
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "seed_oss": {"attention_dropout": 0.0},
}
"""Fields of a family without which its config is refused."""


class Kind(NamedTuple):
    """How all layers of a model attend, and what MLPs they have: ``mlp_name``."""

    is_windowed: bool
    is_capped: bool
    mlp: str = ""


SLIDING = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
"""A config of layers that slide, where their family's may."""


class Sample(NamedTuple):
    """One trace."""

    sizes: dict[str, int]
    kept_bytes: int
    """Bytes that a layer keeps until its backward pass."""
    alive: tuple[tuple[str, int], ...]
    """At each allocation of the last layer's backward pass the operator, and bytes beside what all
    layers keep and what is no layer's; nor what an uneven one takes."""
    sums: tuple[frozenset[str], ...] = ()
    """At each of them names of ``columns`` whose sum takes what an uneven one does."""
    loss: tuple[tuple[str, int], ...] = ()
    """The same of the loss, where one is learned: from the last layer's end to where it goes
    backward.
    """


def main() -> None:
    """Learn, and write."""
    for family in sys.argv[1:] or sorted(json.loads(FILE.read_text())):
        has_tiles = goes_in_tiles(family)
        layers = {
            kind_name(**kind._asdict(), is_recomputed=is_recomputed): learned(
                family, kind, settings(is_recomputed, has_tiles)
            )
            for kind in kinds(family)
            for is_recomputed in (True, False)
        }
        found = json.loads(FILE.read_text())  # another process may learn other families
        found[family] = {"has_tiles": has_tiles, "layers": layers}
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def kinds(family: str) -> list[Kind]:
    """Those that its layers may be of."""
    caps = (False, True) if family_row(family).caps_scores else (False,)
    sliding = {**SLIDING, "model_type": family}
    may_slide = slides(sliding, 0)
    windows = (False, True) if may_slide and family not in ONE_ATTENTION else (False,)
    return [
        Kind(is_windowed, is_capped, mlp)
        for mlp in mlps(family)
        for is_capped in caps
        for is_windowed in windows
    ]


def mlps(family: str) -> list[str]:
    """Names of the MLPs that its layers may have; of experts alone where that is usual."""
    if (usual := family_row(family).experts) is None:
        return [""]
    (shared_field, shared), dense = usual.shared, usual.dense_layers
    alone = [] if shared or shared_field in family_row(family).needs else [""]
    beside = [SHARED] if shared or shared_field else []
    return [*alone, *beside, *([DENSE] if usual.may_be_none or dense != (None, 0) else [])]


def settings(is_recomputed: bool, has_tiles: bool) -> Settings:
    """What layers are traced with."""
    if not is_recomputed:
        return Settings(loss="chunked", recompute="none")
    return Settings(loss="chunked", mlp_tiles=TILES if has_tiles else None)


def goes_in_tiles(family: str) -> bool:
    """Whether the family's MLP can."""
    try:
        sample(family, kinds(family)[0], settings(True, True), number=0)
    except AssertionError as error:  # the trace says why
        if "has no MLP of the form" not in str(error):
            raise
        return False
    return True


def learned(family: str, kind: Kind, settings: Settings) -> dict[str, Any]:
    """Moments of a layer, and what it keeps, as bytes for each product of sizes."""
    name = kind_name(**kind._asdict(), is_recomputed=settings.recompute != "none")
    alike, names = enough_alike(
        f"{family}, {name}", lambda number: sample(family, kind, settings, number=number)
    )
    sizes = np.array([[each.sizes[name] for name in names] for each in alike], float)
    (kept,) = solved(sizes, np.array([[each.kept_bytes] for each in alike], float))
    moments = solved(sizes, np.array([[size for _, size in each.alive] for each in alike], float))
    sums = [
        dict.fromkeys(sorted(frozenset.intersection(*(each.sums[number] for each in alike)))[:1], 1)
        for number in range(len(moments))
    ]
    return {
        "kept": whole(names, kept),
        "moments": [
            whole(names, moments[number]) | sums[number]
            for number in largest(names, moments, sums, family, kind)
        ],
    }


def enough_alike(title: str, sample: Callable[[int], Sample]) -> tuple[list[Sample], list[str]]:
    """Samples by number until those that are alike give more equations than there are products of
    sizes; and the names of these.
    """
    samples = list[Sample]()
    alike, names = samples, list[str]()
    while len(alike) < len(names) + MORE:
        assert len(samples) < MOST_SAMPLES, f"no {len(names) + MORE} of {MOST_SAMPLES} are alike"
        samples.append(sample(len(samples)))
        alike = most_alike(samples)
        names = names_of(alike)
    counts = f"{len(alike)} of {len(samples)} alike, {len(alike[0].alive)} allocations"
    sys.stdout.write(f"{title}: {counts}\n")
    sys.stdout.flush()
    return alike, names


def most_alike(samples: list[Sample]) -> list[Sample]:
    """The most samples that allocate the same things in the same order."""
    orders = Counter(tuple(name for name, _ in each.alive) for each in samples)
    common, _ = orders.most_common(1)[0]
    return [each for each in samples if tuple(name for name, _ in each.alive) == common]


def names_of(alike: list[Sample]) -> list[str]:
    """Names of the products that samples tell apart: of some that are in all of them as many times
    another one, the first.
    """
    found = dict[tuple[Fraction, ...], str]()
    for name in alike[0].sizes:
        numbers = [each.sizes[name] for each in alike]
        if name == "T*G" and len({number > 0 for number in numbers}) == 1:
            continue  # all of one sort: what grouped heads add counts as theirs
        if most := max(numbers):
            found.setdefault(tuple(Fraction(number, most) for number in numbers), name)
    return list(found.values())


def solved(sizes: Any, alive: Any) -> Any:
    """Bytes for each product of sizes, a row for each column of ``alive``."""
    scale = np.abs(sizes).max(axis=0)
    found, _, rank, _ = np.linalg.lstsq(sizes / scale, alive, rcond=None)
    assert rank == sizes.shape[1], f"{sizes.shape[1]} sizes, of which {rank} are independent"
    missed = np.abs(sizes / scale @ found - alive).max()
    assert missed < 16_384, f"{missed} bytes are no product of sizes"
    return (found.T / scale).round()


def whole(names: list[str], numbers: Any, rows: tuple[str, ...] = ROWS) -> dict[str, int]:
    """What is there of each product, rows of weights aside."""
    found = zip(names, numbers, strict=True)
    return {name: int(number) for name, number in found if number and name not in rows}


def sample(family: str, attends: Kind, settings: Settings, *, number: int) -> Sample:
    """One trace of a model of random sizes."""
    drawn = random.Random(number)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)  # fields of None count: scores without a cap
        (directory / "config.json").write_text(json.dumps(config(family, drawn, attends)))
        length_tokens = 256 * drawn.choice((4, 5, 6, 8, 12))
        spec = trial_of(directory, settings=settings, length_tokens=length_tokens)
        log = trace(TraceOrder(spec=spec, rank=fullest_rank(spec)), Path(name, "trace"))
        seen = list(allocations(log, apart=UNEVEN))
        shape = load_model(spec.model_directory).shape
    kind = shape.runs[-1].kind
    phases = {
        phase.name: phase.terms
        for phase in upper_footprint(
            Step(shape, settings, spec.layout, length_tokens=spec.length_tokens)
        ).phases
    }
    beside = sum(
        term.bytes for term in phases["backward of the last layer"] if term.name not in PARTS
    )
    forward, backward = (
        max(n for n, (name, _, _) in enumerate(seen) if name == f"enter {phase}")
        for phase in ("forward", "backward")
    )
    before, after = (
        next(size for _, module, size in seen[forward:] if f"layers.{index}" in module)
        for index in (LAYERS - 2, LAYERS - 1)
    )
    kept = after - before
    events = [
        (name, size - beside - LAYERS * kept, sums_of(name, kind, spec.length_tokens))
        for name, size in last_layer(seen[backward:])
    ]
    events = [each for each in events if each[2] or not each[0].startswith(UNEVEN)]
    return Sample(
        sizes=sizes_of(kind, spec, family, has_tiles=settings.mlp_tiles is not None),
        kept_bytes=kept,
        alive=tuple((name.split(":")[0], size) for name, size, _ in events),
        sums=tuple(sums for _, _, sums in events),
    )


def sums_of(name: str, kind: LayerKind, tokens: int) -> frozenset[str]:
    """Names of the sums over tokens that take as many bytes as an uneven operator does, behind the
    colon in its name; none of what is no sum over a layer's columns, and small.
    """
    operator, _, size = name.partition(":")
    if operator not in UNEVEN:
        return frozenset()
    return frozenset(
        each
        for each, width in columns(kind).items()
        if column_sums(tokens, width, resident_threads=RESIDENT_THREADS).partial_bytes == int(size)
    )


def sizes_of(kind: LayerKind, spec: TrialSpec, family: str, *, has_tiles: bool) -> dict[str, int]:
    """Products of sizes, rows of weights too."""
    tokens, hidden, mlp = spec.length_tokens, kind.hidden_size, kind.mlp
    tile = -(-tokens * mlp.plain_width // TILES) if has_tiles else None
    found = products(kind, tokens=tokens, attended_key=kind.attention.key_size, tile=tile)
    rows = {"one": 1, "D": kind.attention.head_dim, "E": hidden}
    if family in BIASED:
        attention = kind.attention
        rows |= {"F": mlp.width, "Q": attention.query_size, "K": attention.key_size}
    if mlp.is_routed:
        rows |= {"X": mlp.experts, "X*E": mlp.experts * hidden, "X*F": mlp.experts * mlp.width}
    return {**found, **of_scores(kind.attention, tokens), **rows}


def of_scores(attention: AttentionKind, tokens: int) -> Mapping[str, int]:
    """Products of what a document's capped scores take at a time, on one rank."""
    return score_products(
        attention,
        documents=1,
        length_tokens=tokens,
        attended_key=attention.key_size,
        degree=1,
    )


def allocations(log: EventLog, *, apart: tuple[str, ...] = ()) -> Iterator[tuple[str, str, int]]:
    """Each allocation's operator and module, and what is alive with it, or beside it where its
    operator is one of ``apart``: it has its bytes behind a colon then; each phase that begins.
    """
    alive = 0
    sizes: dict[int, int] = {}
    for event in log.events:
        match event:
            case Allocate():
                operator = log.operators[event.operator]
                if operator in apart:
                    yield f"{operator}:{event.bytes}", log.modules[event.module], alive
                else:
                    sizes[event.id] = event.bytes
                    alive += event.bytes
                    yield operator, log.modules[event.module], alive
            case Free() | GiveBack():
                alive -= sizes.pop(event.id, 0)
            case Enter():
                yield f"enter {event.phase}", "", alive
            case _:
                pass


def last_layer(seen: list[tuple[str, str, int]]) -> Iterator[tuple[str, int]]:
    """What is allocated from where the last layer is gathered to where its gradients leave it."""
    first = next(n for n, (name, _, _) in enumerate(seen) if name == "resize_")
    copies = ("resize_", "aten._to_copy.default")
    begins = first
    for number in range(first, len(seen)):
        if seen[number][0] not in copies or seen[number][1]:
            break
        if seen[number][0] == "resize_":
            begins = number + 1
    ends = next(n for n in range(begins, len(seen)) if seen[n][0] == "resize_")
    while seen[ends - 1][0] in ("aten._to_copy.default", "aten.empty.memory_format"):
        ends -= 1  # the next layer, and where the gradients go
    for name, _, size in seen[begins:ends]:
        yield name, size


def config(family: str, drawn: random.Random, attends: Kind) -> dict[str, Any]:
    """The config of a small model whose layers are all alike."""
    # a single one needs fewer copies; some classes want a hidden size that heads divide
    kv_heads = drawn.choice((2, 4, 8))
    grouped = (1,) if family in UNGROUPED else (2, 4) if family_row(family).experts else (1, 2, 4)
    if family == "diffllama":
        kv_heads *= 2  # values go to pairs of them
    heads = kv_heads * drawn.choice(grouped)
    width = 128 * drawn.choice((2, 3, 4, 6, 7, 8))
    tiny = json.loads(Path(load_model("tiny").directory, "config.json").read_text())
    tiny.pop("architectures", None)
    window = "sliding_attention" if attends.is_windowed else "full_attention"
    found: dict[str, Any] = {
        **tiny,
        "model_type": family,
        "hidden_size": 128 * drawn.choice((1, 2, 3, 4, 5)),
        **dict.fromkeys(("intermediate_size", "ffn_dim"), width),
        "head_dim": drawn.choice((64, 128)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": LAYERS,
        "vocab_size": 1024,
        "sliding_window": 512 if attends.is_windowed or not _always_slides(family) else None,
        "use_sliding_window": attends.is_windowed,
        "layer_types": [window] * LAYERS,
        "attn_logit_softcapping": CAP if attends.is_capped else None,
        "pad_token_id": 0,
        **(mixture(family, drawn, attends.mlp, width) if family_row(family).experts else {}),
        **OWN.get(family, {}),
    }
    if family in SHARED_SIZE:
        found["hidden_size"] = found["num_attention_heads"] * found["head_dim"]
    return found


def mixture(family: str, drawn: random.Random, mlp: str, width: int) -> dict[str, Any]:
    """Fields of a config for MLPs of this name in every layer, by all names that families give
    them; ``width``: of an expert, or of a dense layer.
    """
    usual = family_row(family).experts
    assert usual is not None
    (shared_field, _), (dense_field, _) = usual.shared, usual.dense_layers
    is_width = shared_field is not None and shared_field.endswith("intermediate_size")
    beside = 128 * drawn.choice((2, 3, 4, 5)) if is_width else drawn.choice((1, 2, 3))
    return {
        **dict.fromkeys(
            EXPERT_COUNTS, 0 if usual.may_be_none and mlp == DENSE else drawn.choice((4, 5, 6, 8))
        ),
        **dict.fromkeys(EXPERTS_PER_TOKEN, 2 if family == "phimoe" else drawn.choice((2, 3))),
        **({shared_field: 0 if mlp == "" else beside} if shared_field else {}),
        **({dense_field: LAYERS if mlp == DENSE else 0} if dense_field else {}),
        "mlp_layer_types": ["dense" if mlp == DENSE else "sparse"] * LAYERS,
        **dict.fromkeys(("moe_intermediate_size", "prefix_dense_intermediate_size"), width),
        "tie_word_embeddings": False,
    }


def _always_slides(family: str) -> bool:
    """Whether all layers attend within a window where there is one."""
    return slides({"model_type": family, "layer_types": ["full_attention"]}, 0)


def usual_layer(drawn: random.Random) -> LayerKind:
    """A layer with full attention and a dense MLP, of sizes as models have them."""
    hidden, head_dim = drawn.choice((1024, 2048, 4096, 8192)), drawn.choice((64, 128, 256))
    heads = max(1, hidden * drawn.choice((1, 2, 4)) // 2 // head_dim)
    return LayerKind(
        hidden_size=hidden,
        attention=AttentionKind(
            query_heads=heads,
            kv_heads=max(1, heads // drawn.choice((1, 2, 4, 8, 16))),
            head_dim=head_dim,
        ),
        mlp=MlpKind(width=hidden * drawn.choice((2, 3, 6, 8, 12, 16)) // 2),
    )


def largest(
    names: list[str], moments: Any, sums: list[dict[str, int]], family: str, attends: Kind
) -> list[int]:
    """Numbers of the moments that are the largest for some shape as models have them."""
    drawn, found = random.Random(0), set[int]()
    with_sums = [number for number, each in enumerate(sums) if each]
    for _ in range(RANDOM_SHAPES):
        kind = usual_layer(drawn)
        attention, mlp, width = kind.attention, kind.mlp, kind.mlp.width
        if family_row(family).experts and attends.mlp != DENSE:
            mlp = MlpKind(
                width=width // 4,
                experts=drawn.choice((8, 32, 128)),
                experts_per_token=drawn.choice((1, 2, 4, 8)),
                shared_width=width // 4 * drawn.choice((1, 2, 4)) if attends.mlp == SHARED else 0,
            )
        tokens = int(10 ** drawn.uniform(3.5, 6))
        if attends.is_capped:
            window = drawn.choice((512, 1024, 4096)) if attends.is_windowed else None
            attention = replace(attention, window_tokens=window, soft_cap=CAP)
        kind = replace(kind, attention=attention, mlp=mlp)
        of_shape = {
            **dict.fromkeys(ROWS, 0),
            **of_scores(attention, tokens),
            **products(kind, tokens=tokens, attended_key=attention.key_size, tile=None),
        }
        sizes = moments @ np.array([float(of_shape[name]) for name in names])
        for number in with_sums:
            sizes[number] += bytes_of_sums(sums[number], kind, tokens=tokens)
        found.add(int(sizes.argmax()))
    return sorted(found)


if __name__ == "__main__":
    main()
