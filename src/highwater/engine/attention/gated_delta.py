"""Gated delta rule: linear attention whose state forgets, packed documents apart, with the short
convolution before it and the gated norm behind it.

A head has a state of D x V elements, zero where a document begins. Each token scales it by exp(g),
replaces the fraction beta of the state's value for the token's key by the token's value, and reads
it with the token's query. The recurrence is computed by chunks, a triangular system in each. Chunks
ignore the borders of documents; masks keep documents apart, so that a row of many short documents
costs as much as one long document.

Forward and backward passes go by groups of chunks. The inputs and the state before each group are
kept; the backward pass recomputes each group. Memory is linear in the tokens.

Ranks of a ring hold consecutive slices of the row. A slice maps the state before it to the state
after it by ``S' = M S + A``: A is the state after it if that before is zero, and M is the result
for the unit matrix without any values. Ranks gather all A and M, 4 D (D + V) bytes a head whatever
the length, and each computes the state before its slice. The backward pass does the same with M^T,
from the last slice to the first.

Shapes:  S packed tokens  s tokens of a group  H value heads  G key heads (of queries too)  D size
         of a key head  V size of a value head  C channels of the convolution, 2 G D + H V  W taps
         of the convolution  n chunks of a group  c tokens of a chunk
Source: Yang et al., Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.3.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from highwater.engine.attention.block_attention import attended
from highwater.engine.attention.recurrence import recurrence
from highwater.engine.parallel.collectives import exchange, gather_rows
from highwater.nouns.layout import DELTA_CHUNK_TOKENS, DELTA_GROUP_TOKENS

_NORM_EPSILON = 1e-6
"""Added to the squared norm of a query or key, as the kernels of all libraries do."""


class DeltaHeads(NamedTuple):
    """Numbers of key and value heads of linear attention; neighbours share a key head."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def channels(self) -> tuple[int, int, int]:
        """Number of channels of queries, of keys and of values."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size


def gated_delta(
    qkv_SC: Tensor,
    gate_SHV: Tensor,
    log_decay_SH: Tensor,
    beta_SH: Tensor,
    convolution_CW: Tensor,
    norm_V: Tensor,
    *,
    heads: DeltaHeads,
    document_lengths: Sequence[int],
    norm_epsilon: float,
    ring: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the heads' outputs, SHV, normalised and gated, in the dtype of ``qkv_SC``.

    ``qkv_SC`` is the projection's output. ``log_decay_SH`` is the logarithm of the state's decay
    factor, 0 or less; it and ``beta_SH`` are in float32 or wider. Documents cover the whole row, of
    which each rank of the ``ring`` has a slice of equal length, in the order of the ranks.
    """
    tokens, (rank, ranks) = len(qkv_SC), (0, 1) if ring is None else _place_in(ring)
    assert sum(document_lengths) == tokens * ranks, "documents are all of the row"
    # At least one: the document of the token before tells whether a state crosses into the slice.
    lead = min(rank * tokens, max(convolution_CW.shape[1] - 1, 1))
    numbers_P = np.repeat(np.arange(len(document_lengths), dtype=np.int32), document_lengths)
    numbers_S = torch.from_numpy(numbers_P[rank * tokens - lead : (rank + 1) * tokens])
    plan = DeltaPlan(heads, numbers_S.to(qkv_SC.device), norm_epsilon, lead, ring)
    tensors = (qkv_SC, gate_SHV, log_decay_SH, beta_SH, convolution_CW, norm_V)
    out_SHV: Tensor = _GatedDelta.apply(plan, *tensors)
    return out_SHV


def _place_in(ring: dist.ProcessGroup) -> tuple[int, int]:
    return dist.get_rank(ring), dist.get_world_size(ring)


DeltaPass = Literal["forward", "backward", "forward across", "backward across"]
"""Passes over a slice; ``across``: passes that only compute how a state crosses the slice."""


class DeltaPlan(NamedTuple):
    """What a pass of the delta rule needs besides tensors: documents, heads, this rank's part."""

    heads: DeltaHeads
    documents_S: Tensor
    """Number of each token's document, starting with the tokens before the slice that its
    convolution reads."""
    norm_epsilon: float
    lead: int
    """Number of these tokens before the slice."""
    ring: dist.ProcessGroup | None
    """Ranks that have a slice of the row each; None if this rank has the whole row."""

    def groups(self, of: DeltaPass = "forward") -> Iterable[tuple[int, slice]]:
        """Number and slice of the row of each group, the last first in a backward pass. All passes
        use these groups: the tracer computes one of them for all (engine/tracer/kernel_stubs.py).
        """
        tokens, each = len(self.documents_S) - self.lead, DELTA_GROUP_TOKENS
        starts = range(0, tokens, each)
        found = [(n, slice(start, min(start + each, tokens))) for n, start in enumerate(starts)]
        return reversed(found) if of.startswith("backward") else found


class _GatedDelta(torch.autograd.Function):
    """Autograd function over all groups of chunks."""

    @staticmethod
    def forward(ctx: Any, plan: DeltaPlan, *tensors: Tensor) -> Tensor:
        tensors = (*tensors, _lead(plan, tensors[0], tensors[4].shape[1]))

        def run() -> tuple[Tensor, ...]:
            heads, log_decay_SH = plan.heads, tensors[2]
            size = (heads.value_heads, heads.key_size, heads.value_size)
            out_SHV = torch.empty_like(tensors[1], memory_format=torch.contiguous_format)
            states = log_decay_SH.new_zeros(-(-len(out_SHV) // DELTA_GROUP_TOKENS), *size)
            moved: tuple[Tensor, ...] = ()
            if plan.ring is not None:
                moved = _crossed(plan, tensors, states[0])
                states[0] = _carried(*moved, plan.ring)
            for number, place in plan.groups():
                inputs = (*_cut(plan, tensors, place), states[number])
                out_SHV[place], behind_HDV = _of_group(plan, place, inputs)
                states[number + 1 : number + 2] = behind_HDV  # no group follows the last
            return out_SHV, states, *moved[1:]

        out_SHV, *kept = attended(run)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, *kept)
        return out_SHV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan, (gradient_SHV,), saved = ctx.plan, gradients, ctx.saved_tensors
        tensors, (states, *moved) = saved[:7], saved[7:]
        qkv_SC, wide = tensors[0], states.dtype
        whole = [qkv_SC.new_zeros(plan.lead + len(qkv_SC), qkv_SC.shape[1])]
        whole += [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors[1:4]]
        whole += [torch.zeros_like(each, dtype=wide) for each in tensors[4:6]]
        of_state_HDV = torch.zeros_like(states[0])
        if plan.ring is not None:
            for number, place in plan.groups("backward across"):
                cut = (*_cut(plan, tensors, place), states[number])
                gradients = gradient_SHV[place], of_state_HDV
                of_state_HDV.copy_(_state_gradient(plan, place, cut, gradients))
            of_state_HDV = _carried(of_state_HDV, moved[0], plan.ring, is_backward=True)
        for number, place in plan.groups("backward"):
            cut = [*_cut(plan, tensors, place), states[number]]
            gradients = gradient_SHV[place], of_state_HDV
            of_state_HDV.copy_(_add_gradients(plan, place, cut, gradients, whole))
        whole[0] = _with_leads(plan, whole[0], tensors[4].shape[1])
        return None, *whole[:4], *map(torch.Tensor.type_as, whole[4:], tensors[4:6])


def _lead(plan: DeltaPlan, qkv_SC: Tensor, taps: int) -> Tensor:
    """Return the tokens before the slice that its convolution reads, lC."""
    if plan.ring is None:
        return qkv_SC[:0]
    last_lC = qkv_SC[-max(taps - 1, 1) :]
    before = dist.get_rank(plan.ring) * len(last_lC)
    return gather_rows(last_lC, plan.ring)[before - plan.lead : before]


def _with_leads(plan: DeltaPlan, of_qkv_SC: Tensor, taps: int) -> Tensor:
    """Return the gradient of the slice from that of the slice with the tokens before it: add the
    gradients that later slices have for this slice's last tokens.
    """
    if plan.ring is None:
        return of_qkv_SC
    rank, ranks = _place_in(plan.ring)
    of_lead_lC, of_slice_SC = of_qkv_SC.tensor_split((plan.lead,))
    last_lC = of_slice_SC[-max(taps - 1, 1) :]
    sent_RlC = last_lC.new_zeros(ranks, *last_lC.shape)
    before = rank * len(last_lC)
    sent_RlC.flatten(0, 1)[before - plan.lead : before] = of_lead_lC
    last_lC += exchange(sent_RlC, plan.ring).sum(0)
    return of_slice_SC


def _crossed(plan: DeltaPlan, tensors: Sequence[Tensor], zero_HDV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state A that a slice adds, HDV, and its matrix M from old to new state, HDD."""
    sizes = zero_HDV.shape[2], plan.heads.key_size
    unit_DD = torch.eye(sizes[1], dtype=zero_HDV.dtype, device=zero_HDV.device)
    both_HDX = torch.cat((zero_HDV, unit_DD.expand(len(zero_HDV), -1, -1)), dim=-1)
    for _, place in plan.groups("forward across"):
        both_HDX.copy_(_of_group(plan, place, (*_cut(plan, tensors, place), both_HDX))[1])
    added_HDV, moved_HDD = both_HDX.split(sizes, dim=-1)
    return added_HDV, moved_HDD.contiguous()


def _carried(
    added_HDV: Tensor, moved_HDD: Tensor, ring: dist.ProcessGroup, *, is_backward: bool = False
) -> Tensor:
    """Return the state before this rank's slice, by the added states A and matrices M of all
    slices; in the backward pass, the gradient of the state after it.
    """
    rank = dist.get_rank(ring)
    every_RHDX = gather_rows(torch.cat((added_HDV, moved_HDD), dim=-1)[None], ring)
    state_HDV = torch.zeros_like(added_HDV)
    for slice_HDX in every_RHDX[rank + 1 :].flip(0) if is_backward else every_RHDX[:rank]:
        added_HDV, moved_HDD = slice_HDX.split((state_HDV.shape[2], len(moved_HDD[0])), dim=-1)
        state_HDV = (moved_HDD.mT if is_backward else moved_HDD) @ state_HDV + added_HDV
    return state_HDV


def _state_gradient(
    plan: DeltaPlan, place: slice, inputs: Sequence[Tensor], gradients: tuple[Tensor, Tensor]
) -> Tensor:
    """Recompute a group, and return only the gradient of the state before it."""
    state_HDV = inputs[-1].detach().requires_grad_()
    with torch.enable_grad():
        found = _of_group(plan, place, (*inputs[:-1], state_HDV))
    return torch.autograd.grad(found, state_HDV, gradients)[0]


def _add_gradients(
    plan: DeltaPlan,
    place: slice,
    inputs: list[Tensor],
    gradients: tuple[Tensor, Tensor],
    whole: Sequence[Tensor],
) -> Tensor:
    """Recompute a group and add its gradients to those of the slice, of the tokens before it and of
    the weights. Returns the gradient of the state before the group.
    """
    inputs[4:6] = (each.to(inputs[6].dtype) for each in inputs[4:6])
    leaves = [each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        found = _of_group(plan, place, leaves)
    *of_inputs, of_state_HDV = torch.autograd.grad(found, leaves, gradients)
    whole[0][plan.lead + place.stop - len(inputs[0]) : plan.lead + place.stop] += of_inputs[0]
    for total, part in zip(whole[1:4], of_inputs[1:], strict=False):
        total[place] += part
    for total, part in zip(whole[4:], of_inputs[4:], strict=True):
        total += part
    return of_state_HDV


def _cut(plan: DeltaPlan, tensors: Sequence[Tensor], place: slice) -> list[Tensor]:
    """Return a group's inputs, with the tokens before it that its convolution reads."""
    qkv_SC, *others, convolution_CW, norm_V, lead_lC = tensors
    before = min(place.start, convolution_CW.shape[1] - 1)
    qkv_sC = qkv_SC[place.start - before : place.stop]
    if plan.lead and not place.start:
        qkv_sC = torch.cat((lead_lC, qkv_sC))
    return [qkv_sC, *(each[place] for each in others), convolution_CW, norm_V]


def _of_group(plan: DeltaPlan, place: slice, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a group's outputs, sHV, and the state after it, from the state before it. A state with
    extra columns, without values, gives no outputs (None).
    """
    qkv_sC, gate_sHV, log_decay_sH, beta_sH, convolution_CW, norm_V, state_HDV = inputs
    heads, wide = plan.heads, log_decay_sH.dtype
    stop = plan.lead + place.stop
    documents_s = plan.documents_S[stop - len(qkv_sC) : stop]
    convolved_sC = _convolved(qkv_sC.to(wide), convolution_CW.to(wide), documents_s)
    convolved_sC = F.silu(convolved_sC[len(qkv_sC) - len(gate_sHV) :])
    query_sC, key_sC, value_sC = convolved_sC.split(heads.channels, dim=1)
    shared = heads.value_heads // heads.key_heads
    query_sHD, key_sHD = (
        _unit(each.unflatten(1, (heads.key_heads, -1))).repeat_interleave(shared, dim=1)
        for each in (query_sC, key_sC)
    )
    value_sHV = value_sC.unflatten(1, (heads.value_heads, -1))
    scaled_sHD = query_sHD * heads.key_size**-0.5
    chunks = map(_by_chunks, (scaled_sHD, key_sHD, value_sHV, log_decay_sH, beta_sH))
    documents_s = documents_s[len(qkv_sC) - len(gate_sHV) :]
    # Padding of the last chunk counts to the last document, and leaves its state unchanged.
    missing = -len(documents_s) % DELTA_CHUNK_TOKENS
    filled_s = torch.cat((documents_s, documents_s[-1:].expand(missing)))
    documents_nc = filled_s.unflatten(0, (-1, DELTA_CHUNK_TOKENS))
    # At the row's start any document will do: the state is zero there.
    before = plan.documents_S[max(0, stop - len(gate_sHV) - 1)]
    out_sHV, state_HDV = _by_recurrence(tuple(chunks), documents_nc, before, state_HDV)
    if out_sHV is None:
        return gate_sHV[:0], state_HDV
    return _normed(plan, out_sHV[: len(gate_sHV)], gate_sHV, norm_V), state_HDV


def _convolved(x_sC: Tensor, convolution_CW: Tensor, documents_s: Tensor) -> Tensor:
    """Convolve each channel over a token and the tokens before it in its document; sC."""
    taps = convolution_CW.shape[1]
    found_sC = x_sC * convolution_CW[:, -1]
    for back in range(1, min(taps, len(x_sC))):
        is_same_s1 = (documents_s[back:] == documents_s[:-back])[:, None]
        moved_sC = x_sC[:-back] * is_same_s1 * convolution_CW[:, -1 - back]
        found_sC = found_sC + F.pad(moved_sC, (0, 0, back, 0))
    return found_sC


def _unit(x_sHD: Tensor) -> Tensor:
    return x_sHD * (x_sHD.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()


def _by_chunks(x_sH: Tensor) -> Tensor:
    """Cut tokens into chunks, from sHX to nHcX; the last chunk is padded with zeros."""
    missing = -len(x_sH) % DELTA_CHUNK_TOKENS
    filled_sH = F.pad(x_sH, (*(0, 0) * (x_sH.ndim - 1), 0, missing)) if missing else x_sH
    return filled_sH.unflatten(0, (-1, DELTA_CHUNK_TOKENS)).transpose(1, 2)


def _by_recurrence(
    chunks: tuple[Tensor, ...], documents_nc: Tensor, before: Tensor, state_HDV: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return outputs, sHV, and the state after the chunks; ``before``: the document of the state
    before them. No outputs for a state with more columns than values.
    """
    query_nHcD, key_nHcD, value_nHcV, log_decay_nHc, beta_nHc = chunks
    last_n = torch.cat((before[None], documents_nc[:-1, -1]))
    enters_n1c = (documents_nc == last_n[:, None])[:, None]
    is_seen_n1cc = (documents_nc[:, :, None] == documents_nc[:, None]).tril()[:, None]
    # Separate sums from each token on: differences of the chunk's sums would round at their size.
    behind_nHcc = log_decay_nHc[..., None].expand(*log_decay_nHc.shape, DELTA_CHUNK_TOKENS)
    is_behind_cc = torch.ones_like(is_seen_n1cc[0, 0]).tril(-1)
    behind_nHcc = behind_nHcc.masked_fill(~is_behind_cc, 0).cumsum(-2)
    between_nHcc = behind_nHcc.masked_fill(~is_seen_n1cc, float("-inf")).exp()
    from_start_nHc1 = (log_decay_nHc.cumsum(-1).exp() * enters_n1c)[..., None]
    to_end_nHc1 = between_nHcc[..., -1, :, None]
    weighted_nHcD = key_nHcD * beta_nHc[..., None]
    system_nHcc = (weighted_nHcD @ key_nHcD.mT) * between_nHcc
    sides = (value_nHcV * beta_nHc[..., None], weighted_nHcD * from_start_nHc1)
    solved_nHcX = torch.linalg.solve_triangular(
        system_nHcc, torch.cat(sides, dim=-1), upper=False, unitriangular=True
    )
    new_nHcV, read_nHcD = solved_nHcX.split([side.shape[-1] for side in sides], dim=-1)
    further = state_HDV.shape[-1] - value_nHcV.shape[-1]
    if further:
        new_nHcV, key_nHcD = F.pad(new_nHcV, (0, further)), key_nHcD * to_end_nHc1
        kept_nH = from_start_nHc1[:, :, -1, 0]
        return None, recurrence(new_nHcV, read_nHcD, key_nHcD, kept_nH, state_HDV)[2]
    within_nHcc = (query_nHcD @ key_nHcD.mT) * between_nHcc
    query_nHcD, key_nHcD = query_nHcD * from_start_nHc1, key_nHcD * to_end_nHc1
    written_nHcV, states_nHDV, state_HDV = recurrence(
        new_nHcV, read_nHcD, key_nHcD, from_start_nHc1[:, :, -1, 0], state_HDV
    )
    out_nHcV = query_nHcD @ states_nHDV + within_nHcc @ written_nHcV
    return out_nHcV.transpose(1, 2).flatten(0, 1), state_HDV


def _normed(plan: DeltaPlan, out_sHV: Tensor, gate_sHV: Tensor, norm_V: Tensor) -> Tensor:
    """Divide outputs by their heads' root mean square, then weight and gate them; sHV."""
    scale_sH1 = (out_sHV.square().mean(-1, keepdim=True) + plan.norm_epsilon).rsqrt()
    gated_sHV = out_sHV * scale_sH1 * norm_V * F.silu(gate_sHV.to(out_sHV.dtype))
    return gated_sHV.to(gate_sHV.dtype)
