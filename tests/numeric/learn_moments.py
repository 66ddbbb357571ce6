"""Learn what a layer of a family takes at the moments that may be its peak, from traces, and write
``memory/formula/moments.json``:

    python -P tests/numeric/learn_moments.py [FAMILY...]

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent))

from traces import trace, trial

from highwater.memory.formula.breakdown import WORKSPACES
from highwater.memory.formula.formula import footprint
from highwater.memory.formula.moments import FILE, capped_products, kind_name, products
from highwater.run.tracing import fullest_rank
from highwater.spec.events import Allocate, Enter, Free, GiveBack, TraceOrder
from highwater.spec.families import WITH_CAPS
from highwater.spec.layer_kind import AttentionKind, LayerKind, MlpKind
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.spec.trial import TrialSpec
from highwater.spec.windows import slides

LAYERS = 3
SAMPLES = 40
UNEVEN = ("inside aten.sum.dim_IntList",)
"""Operators whose memory is no product of sizes, and small: sums over tokens by rows."""
TILES = 2
RANDOM_SHAPES = 20_000
"""Shapes among which a moment has to be the largest of one to be kept."""


PARTS = ("one layer going backward", "kept by recompute", "activations of all layers", WORKSPACES)
"""Terms of the formula that are a layer's, or no tensor's."""
EXPERTS = ("flex_olmo", "gpt_oss", "granitemoe", "mellum", "minimax_m2", "olmoe", "phimoe")
SHARED_SIZE = ("gpt_neox", "helium", "phimoe")
"""Families whose heads share the hidden size."""
CAP = 50.0
"""Of scores, where they are capped; its value is no matter."""
ROWS = ("one", "E", "F", "Q", "K", "X*E", "X*F")
"""Products that a trace has and the formula leaves out: rows of weights, biases."""
BIASED = ("glm", "glm4", "gpt_neox", "jais2", "opt", "persimmon", "seed_oss", "starcoder2")
"""Families whose matrices have biases, of as many numbers as a matrix has rows."""
OWN: Mapping[str, Mapping[str, Any]] = {"seed_oss": {"attention_dropout": 0.0}}
"""Fields of a family without which its config is refused."""


class Kind(NamedTuple):
    """How all layers of a model attend."""

    is_windowed: bool
    is_capped: bool


SLIDING = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
"""A config of layers that slide, where their family's may."""
FULL = Kind(is_windowed=False, is_capped=False)


class Sample(NamedTuple):
    """One trace."""

    sizes: dict[str, int]
    kept_bytes: int
    """Bytes that a layer keeps until its backward pass."""
    alive: tuple[tuple[str, int], ...]
    """At each allocation of the last layer's backward pass the operator, and bytes beside what all
    layers keep and what is no layer's."""


def main() -> None:
    """Learn, and write."""
    found = json.loads(FILE.read_text())
    for family in sys.argv[1:] or sorted(found):
        has_tiles = goes_in_tiles(family)
        layers = {
            kind_name(**kind._asdict(), is_recomputed=is_recomputed): learned(
                family, kind, settings(is_recomputed, has_tiles)
            )
            for kind in kinds(family)
            for is_recomputed in (True, False)
        }
        found[family] = {"has_tiles": has_tiles, "layers": layers}
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def kinds(family: str) -> list[Kind]:
    """Those that its layers may be of."""
    caps = (False, True) if family in WITH_CAPS else (False,)
    may_slide = slides({**SLIDING, "model_type": family}, 0)
    windows = (False, True) if may_slide else (False,)
    return [Kind(is_windowed, is_capped) for is_capped in caps for is_windowed in windows]


def settings(is_recomputed: bool, has_tiles: bool) -> Settings:
    """What layers are traced with."""
    if not is_recomputed:
        return Settings(loss="chunked", recompute="none")
    return Settings(loss="chunked", mlp_tiles=TILES if has_tiles else None)


def goes_in_tiles(family: str) -> bool:
    """Whether the family's MLP can."""
    try:
        sample(family, FULL, settings(True, True), number=0)
    except AssertionError as error:  # the trace says why
        if "has no MLP of the form" not in str(error):
            raise
        return False
    return True


def learned(family: str, kind: Kind, settings: Settings) -> dict[str, Any]:
    """Moments of a layer, and what it keeps, as bytes for each product of sizes."""
    samples = [sample(family, kind, settings, number=number) for number in range(SAMPLES)]
    orders = Counter(tuple(name for name, _ in each.alive) for each in samples)
    common, count = orders.most_common(1)[0]
    alike = [each for each in samples if tuple(name for name, _ in each.alive) == common]
    name = kind_name(**kind._asdict(), is_recomputed=settings.recompute != "none")
    sys.stdout.write(f"{family}, {name}: {count} of {SAMPLES} alike, {len(common)} allocations\n")
    sys.stdout.flush()
    names = list(alike[0].sizes)
    if len({each.sizes["T*G"] > 0 for each in alike}) == 1:
        names.remove("T*G")  # all of one sort: what grouped heads add counts as theirs
    if all(each.sizes["T*Q"] == each.sizes["T*E"] for each in alike):
        names = [name for name in names if name not in ("T*Q", "Q")]
    if all(each.sizes.get("l*K") == each.sizes["T*K"] for each in alike):
        names.remove("l*K")  # without a window all keys are read
    sizes = np.array([[each.sizes[name] for name in names] for each in alike], float)
    (kept,) = solved(sizes, np.array([[each.kept_bytes] for each in alike], float))
    moments = solved(sizes, np.array([[size for _, size in each.alive] for each in alike], float))
    return {
        "kept": whole(names, kept),
        "moments": [
            whole(names, moments[number]) for number in largest(names, moments, family, kind)
        ],
    }


def solved(sizes: Any, alive: Any) -> Any:
    """Bytes for each product of sizes, a row for each column of ``alive``."""
    scale = np.abs(sizes).max(axis=0)
    found, _, rank, _ = np.linalg.lstsq(sizes / scale, alive, rcond=None)
    assert rank == sizes.shape[1], f"{sizes.shape[1]} sizes, of which {rank} are independent"
    missed = np.abs(sizes / scale @ found - alive).max()
    assert missed < 16_384, f"{missed} bytes are no product of sizes"
    return (found.T / scale).round()


def whole(names: list[str], numbers: Any) -> dict[str, int]:
    """What is there of each product, rows of weights aside."""
    found = zip(names, numbers, strict=True)
    return {name: int(number) for name, number in found if number and name not in ROWS}


def sample(family: str, attends: Kind, settings: Settings, *, number: int) -> Sample:
    """One trace of a model of random sizes."""
    drawn = random.Random(number)
    with tempfile.TemporaryDirectory() as name:
        spec = trial(
            Path(name, "model"),
            config(family, drawn, attends),
            settings=settings,
            length_tokens=256 * drawn.choice((4, 5, 6, 8, 12)),
        )
        seen = list(allocations(spec, Path(name, "trace")))
        shape = load_model(spec.model_directory).shape
    kind = shape.runs[-1].kind
    phases = {
        phase.name: phase.terms
        for phase in footprint(
            shape, settings, spec.layout, length_tokens=spec.length_tokens
        ).phases
    }
    beside = sum(
        term.bytes for term in phases["backward of the last layer"] if term.name not in PARTS
    )
    forward, backward = (
        max(n for n, (name, _, _) in enumerate(seen) if name == f"enter {phase}")
        for phase in ("forward", "backward")
    )
    second, third = (
        next(size for _, module, size in seen[forward:] if f"layers.{index}" in module)
        for index in (1, 2)
    )
    kept = third - second
    return Sample(
        sizes=sizes_of(kind, spec, family, has_tiles=settings.mlp_tiles is not None),
        kept_bytes=kept,
        alive=tuple(
            (name, size - beside - LAYERS * kept) for name, size in last_layer(seen[backward:])
        ),
    )


def sizes_of(kind: LayerKind, spec: TrialSpec, family: str, *, has_tiles: bool) -> dict[str, int]:
    """Products of sizes, rows of weights too."""
    tokens, hidden, mlp = spec.length_tokens, kind.hidden_size, kind.mlp
    tile = -(-tokens * mlp.width // TILES) if has_tiles else None
    found = products(kind, tokens=tokens, attended_key=kind.attention.key_size, tile=tile)
    rows = {"one": 1, "E": hidden}
    if family in BIASED:
        attention = kind.attention
        rows |= {"F": mlp.width, "Q": attention.query_size, "K": attention.key_size}
    if mlp.experts > 1:
        rows |= {"X*E": mlp.experts * hidden, "X*F": mlp.experts * mlp.width}
    return {**found, **of_scores(kind.attention, tokens), **rows}


def of_scores(attention: AttentionKind, tokens: int) -> Mapping[str, int]:
    """Products of what a document's capped scores take at a time, on one rank."""
    return capped_products(
        attention,
        documents=1,
        length_tokens=tokens,
        attended_key=attention.key_size,
        degree=1,
    )


def allocations(spec: TrialSpec, path: Path) -> Iterator[tuple[str, str, int]]:
    """Each allocation's operator and module, and what is alive with it; each phase that begins."""
    log = trace(TraceOrder(spec=spec, rank=fullest_rank(spec)), path)
    alive = 0
    sizes: dict[int, int] = {}
    for event in log.events:
        match event:
            case Allocate():
                operator = log.operators[event.operator]
                if operator not in UNEVEN:
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
    kv_heads = drawn.choice((1, 2, 4))
    tiny = json.loads(Path(load_model("tiny").directory, "config.json").read_text())
    tiny.pop("architectures", None)
    experts = {
        **dict.fromkeys(("num_local_experts", "num_experts"), drawn.choice((4, 5, 6, 8))),
        "num_experts_per_tok": 2 if family == "phimoe" else drawn.choice((2, 3)),
        "tie_word_embeddings": False,
    }
    window = "sliding_attention" if attends.is_windowed else "full_attention"
    found = {
        **tiny,
        "model_type": family,
        "hidden_size": 128 * drawn.choice((1, 2, 3, 4, 5)),
        "intermediate_size": 128 * drawn.choice((2, 3, 4, 6, 7, 8)),
        "head_dim": drawn.choice((64, 128)),
        "num_attention_heads": kv_heads * drawn.choice((2, 4) if family in EXPERTS else (1, 2, 4)),
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": LAYERS,
        "vocab_size": 1024,
        "sliding_window": 512 if attends.is_windowed or not _always_slides(family) else None,
        "layer_types": [window] * LAYERS,
        "attn_logit_softcapping": CAP if attends.is_capped else None,
        "pad_token_id": 0,
        **OWN.get(family, {}),
        **(experts if family in EXPERTS else {}),
    }
    if family in EXPERTS:
        found["moe_intermediate_size"] = found["intermediate_size"]
    if family in SHARED_SIZE:
        found["hidden_size"] = found["num_attention_heads"] * found.pop("head_dim")
    return found


def _always_slides(family: str) -> bool:
    """Whether all layers attend within a window where there is one."""
    return slides({"model_type": family, "layer_types": ["full_attention"]}, 0)


def largest(names: list[str], moments: Any, family: str, attends: Kind) -> list[int]:
    """Numbers of the moments that are the largest for some shape as models have them."""
    drawn, found = random.Random(0), set[int]()
    for _ in range(RANDOM_SHAPES):
        hidden, head_dim = drawn.choice((1024, 2048, 4096, 8192)), drawn.choice((64, 128, 256))
        heads = max(1, hidden * drawn.choice((1, 2, 4)) // 2 // head_dim)
        attention = AttentionKind(
            query_heads=heads,
            kv_heads=max(1, heads // drawn.choice((1, 2, 4, 8, 16))),
            head_dim=head_dim,
        )
        width = hidden * drawn.choice((2, 3, 6, 8, 12, 16)) // 2
        mlp = MlpKind(width=width)
        if family in EXPERTS:
            mlp = MlpKind(
                width=width // 4,
                experts=drawn.choice((8, 32, 128)),
                experts_per_token=drawn.choice((1, 2, 4, 8)),
            )
        tokens = int(10 ** drawn.uniform(3.5, 6))
        if attends.is_capped:
            window = drawn.choice((512, 1024, 4096)) if attends.is_windowed else None
            attention = replace(attention, window_tokens=window, soft_cap=CAP)
        kind = LayerKind(hidden_size=hidden, attention=attention, mlp=mlp)
        of_shape = {
            **dict.fromkeys(ROWS, 0),
            **of_scores(attention, tokens),
            **products(kind, tokens=tokens, attended_key=attention.key_size, tile=None),
        }
        found.add(int((moments @ np.array([float(of_shape[name]) for name in names])).argmax()))
    return sorted(found)


if __name__ == "__main__":
    main()
