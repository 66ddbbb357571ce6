"""Fused modules: replace modules of a family by our own if a small test shows that both compute the
same.

A family's RMS norm is a dozen elementwise kernels with float32 copies of its input; PyTorch's is
one kernel each way that keeps the input and one value per row. Ours normalises and rotates all
heads in two kernels, a family in a dozen (engine/models/fused/rotary_attention.py). A gated MLP
keeps only its input (engine/models/fused/gated_mlp.py), and so do experts in tiles (experts.py).

The tests ("proofs") run small modules of the family's classes on random input, on the CPU.
"""

import copy
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from highwater.engine.kernels.norm import RowNorm
from highwater.engine.models.fused.experts import IMPLEMENTATION, experts_output, use_tiles
from highwater.engine.models.fused.gated_mlp import GatedMlp
from highwater.engine.models.fused.rotary_attention import NORMS, PROJECTIONS, RotaryAttention
from highwater.nouns.layout import TILED_EXPERTS

PROOF_SIZE = 32
PROOF_TOLERANCE = 1e-5
"""Relative tolerance in float32, for the same operations in another order. A norm that computes
anything else is off by far more."""
ModuleT = TypeVar("ModuleT", bound=nn.Module)
_PROOF_HEADS, _PROOF_KEYS = 4, 2
_PROOF_ATTENTION = "highwater_proof"
"""Name under which a proof's attention function is registered; both modules call it."""


def fuse_norms(model: nn.Module) -> int:
    """Replace every RMS norm that ours can compute, also one of a family that adds 1 to the weight,
    in place; returns the number replaced. Parameters keep their names.
    """
    count = 0
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            eps = _epsilon(norm)
            if eps is None or (added := _added_to_the_weight(type(norm), eps)) is None:
                continue
            weight = cast(nn.Parameter, norm.weight)
            how: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
            fused = RmsNorm(weight.shape[0], added=added, eps=eps, **how)
            fused.weight = weight
            setattr(parent, name, fused)
            count += 1
    return count


def _epsilon(module: nn.Module) -> float | None:
    """Return the epsilon of a module with an RMS norm's name and weight; None for others."""
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm):
        return None
    weight_alone = [name for name, _ in module.named_parameters()] == ["weight"]
    if not weight_alone or cast(torch.Tensor, module.weight).ndim != 1:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


@cache  # one proof for all norms of a class and an epsilon
def _added_to_the_weight(kind: type[nn.Module], eps: float) -> float | None:
    """Return the number, 0 or 1, that a class of norms adds to its weight: that with which ours
    equals a small norm of the class on inputs of many magnitudes. None if neither does.
    """
    try:
        theirs = cast(Any, kind)(PROOF_SIZE, eps=eps).to(device="cpu", dtype=torch.float32)
    except TypeError:
        return None  # its constructor takes other arguments: not replaced
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, PROOF_SIZE, generator=generator) * torch.logspace(-4, 2, 64)[:, None]
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(PROOF_SIZE, generator=generator))
        for added in (0.0, 1.0):
            ours = nn.RMSNorm(PROOF_SIZE, eps=eps)
            ours.weight.copy_(theirs.weight + added)
            off = PROOF_TOLERANCE
            if torch.allclose(theirs(inputs), ours(inputs), rtol=off, atol=off):
                return added
    return None


class RmsNorm(nn.RMSNorm):
    """PyTorch's RMS norm on a GPU; on the CPU, and if a number is added to the weight, our own
    (engine/kernels/norm.py), as PyTorch's would be a dozen operators with float32 copies.
    """

    def __init__(self, size: int, *, added: float = 0.0, **how: Any) -> None:
        """``added``: number added to the weight, in float32; ``how``: arguments of PyTorch's."""
        super().__init__(size, **how)
        self.added = added

    @property
    def scale(self) -> Tensor:
        """Factors of a row's elements: the weight, plus ``added`` in float32 or wider."""
        if not self.added:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.added

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` over its last dimension."""
        if x.is_cuda and not self.added:
            return super().forward(x)
        return cast(Tensor, RowNorm.apply(x, self.scale, self.eps))


def fuse_attentions(model: nn.Module) -> int:
    """Replace every attention that RotaryAttention can compute, in place; returns the number.

    Parameters keep their names. Call it after ``fuse_norms``. Each attention is tested by itself:
    layers of one class may differ, like those without positions.
    """
    count = 0
    for parent in list(model.modules()):
        for name, attention in list(parent.named_children()):
            features = _proven_features(attention) if _has_projected_heads(attention) else None
            if features is not None:
                setattr(parent, name, RotaryAttention(attention, features))
                count += 1
    return count


def _has_projected_heads(module: nn.Module) -> bool:
    """True if a module has exactly RotaryAttention's children, and no own parameters."""
    children = dict(module.named_children())
    known = (set(PROJECTIONS), {*PROJECTIONS, *NORMS})
    if isinstance(module, RotaryAttention) or set(children) not in known:
        return False
    norms = [child for name, child in children.items() if name in NORMS]
    return (
        all(type(children[name]) is nn.Linear for name in PROJECTIONS)
        and all(isinstance(norm, RmsNorm) and norm.eps is not None for norm in norms)
        and not list(module.parameters(recurse=False))
        and not list(module.buffers())
    )


def _proven_features(module: nn.Module) -> dict[str, Any] | None:
    """Return the keywords that a module passes to attention if a small copy equals ours."""
    generator = torch.Generator().manual_seed(0)
    size, tokens = PROOF_SIZE // _PROOF_HEADS, 16
    theirs: Any = copy.copy(module)
    children = module.named_children()
    theirs._modules = {name: _small_child(name, own, size, generator) for name, own in children}
    theirs.head_dim, theirs.num_key_value_groups = size, _PROOF_HEADS // _PROOF_KEYS
    inputs, cosines, sines = (
        torch.randn(1, tokens, width, generator=generator, dtype=torch.float64)
        for width in (PROOF_SIZE, size, size)
    )
    features: dict[str, Any] | None = None
    try:
        theirs.config = copy.copy(theirs.config)
        theirs.config._attn_implementation = _PROOF_ATTENTION
        # Large inputs too, because some families clip their heads.
        for scale in (1.0, 1e3):
            features = _features_of_equals(theirs, scale * inputs, (cosines, sines))
            # A scale computed from the head's size would be that of the small copy.
            if features is None or features.get("scaling") != getattr(module, "scaling", None):
                return None
    # the module needs something that ours does not give: not replaced
    except Exception:  # noqa: BLE001
        return None
    return None if _rotates_a_part(theirs, inputs, cosines[..., ::2], sines[..., ::2]) else features


def _features_of_equals(
    theirs: nn.Module, inputs: Tensor, positions: tuple[Tensor, Tensor]
) -> dict[str, Any] | None:
    """Return the keywords that ``theirs`` passes to its attention function, if a RotaryAttention of
    its children passes equal heads and keywords, and gives equal output; else None.
    """
    seen: list[tuple[list[Tensor], dict[str, Any]]] = []

    def attend(
        _: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **features: Any
    ) -> tuple[Tensor, None]:
        assert mask is None, "it was given none"
        seen.append(([query, key, value], features))
        return query.transpose(1, 2).square().contiguous(), None

    AttentionInterface.register(_PROOF_ATTENTION, attend)
    call = {"hidden_states": inputs, "position_embeddings": positions, "attention_mask": None}
    with torch.no_grad():
        expected = theirs(**call)[0]
        told = {name: value for name, value in seen[-1][1].items() if name != "dropout"}
        ours = RotaryAttention(theirs, told)(**call)[0]
    (their_heads, their_features), (our_heads, our_features) = seen[-2:]
    same = our_features == their_features and all(
        mine.shape == other.shape and torch.allclose(mine, other, rtol=1e-10, atol=1e-10)
        for mine, other in zip([*our_heads, ours], [*their_heads, expected], strict=True)
    )
    return told if same else None


def _rotates_a_part(attention: Any, inputs: Tensor, cosines: Tensor, sines: Tensor) -> bool:
    """True if a module accepts positions for half a head, and so rotates only that half."""
    call = {"hidden_states": inputs, "position_embeddings": (cosines, sines)}
    try:
        with torch.no_grad():
            attention(**call, attention_mask=None)
    except RuntimeError:
        return False
    return True


def _small_child(name: str, child: nn.Module, size: int, generator: torch.Generator) -> nn.Module:
    if isinstance(child, RmsNorm):
        wide: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
        small: nn.Module = RmsNorm(size, added=child.added, eps=child.eps, **wide)
    else:
        heads = {"q_proj": _PROOF_HEADS, "k_proj": _PROOF_KEYS, "v_proj": _PROOF_KEYS}
        is_output = name == "o_proj"
        widths = (_PROOF_HEADS * size, PROOF_SIZE)
        widths = widths if is_output else (PROOF_SIZE, heads[name] * size)
        bias = "bias" in dict(child.named_parameters())
        small = nn.Linear(*widths, bias=bias, device="cpu", dtype=torch.float64)
    return _random(small, generator)


def _random(small: ModuleT, generator: torch.Generator) -> ModuleT:
    """Fill a module's parameters with random values, and return the module."""
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return small


def fuse_mlps(model: nn.Module, *, tiles: int | None) -> int:
    """Replace every MLP that GatedMlp can compute, in place; returns the number replaced.

    Parameters keep their names. ``tiles`` is as in GatedMlp.
    """
    proven: dict[tuple[object, ...], bool] = {}
    count = 0
    for parent in list(model.modules()):
        for name, mlp in list(parent.named_children()):
            projections = _projections(mlp)
            if projections is None:
                continue
            named = ((n, *dict(p.named_parameters())) for n, p in projections.items())
            kind = (type(mlp), type(getattr(mlp, "act_fn", None)), *named)
            if kind not in proven:
                proven[kind] = _computes_gated_mlp(mlp, projections)
            if proven[kind]:
                setattr(parent, name, GatedMlp(projections, tiles=tiles))
                count += 1
    return count


def _projections(module: nn.Module) -> dict[str, nn.Linear] | None:
    """Return a module's linear children by name if they are exactly a gated MLP's; else None."""
    linear = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    known = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
    if isinstance(module, GatedMlp) or set(linear) not in known:
        return None
    owned = {id(parameter) for child in linear.values() for parameter in child.parameters()}
    if {id(parameter) for parameter in module.parameters()} != owned or list(module.buffers()):
        return None
    width = linear["down_proj"].out_features
    inner = (projection for name, projection in linear.items() if name != "down_proj")
    return linear if all(projection.in_features == width for projection in inner) else None


def _computes_gated_mlp(module: nn.Module, projections: dict[str, nn.Linear]) -> bool:
    """True if a small MLP of this kind equals a small GatedMlp on random input."""
    generator = torch.Generator().manual_seed(0)
    small = {name: _small(name, linear, generator) for name, linear in projections.items()}
    theirs = copy.copy(module)
    # The same module with smaller projections.
    theirs._modules = {**module._modules, **small}  # pyright: ignore[reportPrivateUsage]
    inputs = torch.randn(1, 64, PROOF_SIZE, generator=generator, dtype=torch.float64)
    try:
        with torch.no_grad():
            expected = theirs(inputs)
            ours = GatedMlp(small, tiles=None)(inputs)
    # the module needs more than its projections, which ours does not give: not replaced
    except Exception:  # noqa: BLE001
        return False
    same = expected.shape == ours.shape
    return same and bool(torch.allclose(ours, expected, rtol=1e-10, atol=1e-10))


def _small(name: str, linear: nn.Linear, generator: torch.Generator) -> nn.Linear:
    inner, bias = 2 * PROOF_SIZE + 3, "bias" in dict(linear.named_parameters())
    others = {"down_proj": (inner, PROOF_SIZE), "gate_up_proj": (PROOF_SIZE, 2 * inner)}
    sizes = others.get(name, (PROOF_SIZE, inner))
    return _random(nn.Linear(*sizes, bias=bias, device="cpu", dtype=torch.float64), generator)


def tile_experts(model: PreTrainedModel, *, tiles: int | None) -> int:
    """Compute experts of a family in ``TILED_EXPERTS`` in tiles, if that equals the family's own
    result, in place; returns the number of changed modules. ``tiles`` as in expert_tile_tokens.
    """
    found: list[Any] = [each for each in model.modules() if hasattr(each, "gate_up_proj")]
    found = [each for each in found if isinstance(each.gate_up_proj, nn.Parameter)]
    if model.config.model_type not in TILED_EXPERTS or not found or not _computes(found[0]):
        return 0
    assert len({type(each) for each in found}) == 1, "one proof is of all experts"
    own = cast(str, model.config._experts_implementation)  # pyright: ignore[reportPrivateUsage]
    untiled = ALL_EXPERTS_FUNCTIONS.get_interface(own, type(found[0]).forward.__wrapped__)
    for experts in found:
        use_tiles(experts, tiles=tiles, untiled=untiled)
    model.set_experts_implementation(IMPLEMENTATION)
    return len(found)


def _computes(experts: Any) -> bool:
    """True if small experts of this kind give equal outputs with and without tiles."""
    small, call = small_experts(experts)
    with torch.no_grad():
        expected, ours = small.untiled(small, *call), experts_output(small, *call)
    return bool(torch.allclose(ours, expected, rtol=1e-10, atol=1e-10))


def small_experts(experts: Any) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """Return a module of three small experts of this kind, in tiles, with random weights; and
    arguments to call it with: tokens, the experts of each token, and their weights.
    """
    generator = torch.Generator().manual_seed(0)
    small = copy.copy(experts)
    count, inner, tokens = 3, PROOF_SIZE + 3, 16

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    small._parameters = {
        "gate_up_proj": nn.Parameter(numbers(count, 2 * inner, PROOF_SIZE), requires_grad=False),
        "down_proj": nn.Parameter(numbers(count, PROOF_SIZE, inner), requires_grad=False),
    }
    small.num_experts = count
    # transformers' plain implementation, which handles any gate, bias or order of experts
    use_tiles(small, tiles=3, untiled=ALL_EXPERTS_FUNCTIONS["batched_mm"])
    chosen = torch.randint(count, (tokens, 2), generator=generator)
    return small, (numbers(tokens, PROOF_SIZE), chosen, numbers(tokens, 2))
