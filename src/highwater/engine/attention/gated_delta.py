"""Gated delta rule: linear attention whose state forgets, packed documents apart, with the short
convolution before it and the gated norm behind it.

A head has a state of D x V numbers, zero where a document begins. Each token scales it by exp(g),
replaces the part beta of what it has for the token's key by the token's value, and reads it with
the token's query. The recurrence goes by chunks: within one it is a triangular system. Chunks lie
in the row whatever its documents are; masks keep those apart, so that a row of many short documents
costs as much as a long one.

Forward and backward go by groups of chunks. What is kept are the inputs and the state in front of
each group; the backward pass computes a group again. Memory is linear in the tokens.

Shapes:  S packed tokens  s tokens of a group  H value heads  G key heads (of queries too)  D size
         of a key head  V size of a value head  C channels of the convolution, 2 G D + H V  W taps
         of the convolution  n chunks of a group  c tokens of a chunk
Source: Yang et al., Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.3.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from highwater.engine.attention.block_attention import attended
from highwater.engine.attention.recurrence import recurrence
from highwater.nouns.layout import DELTA_CHUNK_TOKENS, DELTA_GROUP_TOKENS

_NORM_EPSILON = 1e-6
"""Added to the square of a query's or a key's length, as the kernels of all libraries do."""


class DeltaHeads(NamedTuple):
    """Heads of a layer; consecutive value heads share a key head."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values, in this order."""
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
) -> Tensor:
    """Return the heads' outputs, SHV, normed and gated, in the dtype of ``qkv_SC``.

    ``qkv_SC`` is as it was projected. ``log_decay_SH`` is the logarithm of what the state is scaled
    by, 0 or less; it and ``beta_SH`` are in float32 or wider. Documents are all of the row.
    """
    assert sum(document_lengths) == len(qkv_SC), "documents are all of the row"
    numbers_S = np.repeat(np.arange(len(document_lengths), dtype=np.int32), document_lengths)
    plan = DeltaPlan(heads, torch.from_numpy(numbers_S).to(qkv_SC.device), norm_epsilon)
    tensors = (qkv_SC, gate_SHV, log_decay_SH, beta_SH, convolution_CW, norm_V)
    out_SHV: Tensor = _GatedDelta.apply(plan, *tensors)
    return out_SHV


class DeltaPlan(NamedTuple):
    """What a pass is besides its tensors."""

    heads: DeltaHeads
    documents_S: Tensor
    """Number of each token's document."""
    norm_epsilon: float

    def groups(self, *, is_backward: bool = False) -> Iterable[tuple[int, slice]]:
        """Numbers of the groups and their places in the row, of the backward pass the last first.

        Passes go through these and no others: the tracer lets one stand for all
        (engine/tracer/kernel_stubs.py).
        """
        tokens, each = len(self.documents_S), DELTA_GROUP_TOKENS
        starts = range(0, tokens, each)
        found = [(n, slice(start, min(start + each, tokens))) for n, start in enumerate(starts)]
        return reversed(found) if is_backward else found


class _GatedDelta(torch.autograd.Function):
    """Autograd function over all groups."""

    @staticmethod
    def forward(ctx: Any, plan: DeltaPlan, *tensors: Tensor) -> Tensor:
        def run() -> tuple[Tensor, Tensor]:
            heads, log_decay_SH = plan.heads, tensors[2]
            size = (heads.value_heads, heads.key_size, heads.value_size)
            out_SHV = torch.empty_like(tensors[1], memory_format=torch.contiguous_format)
            states = log_decay_SH.new_zeros(-(-len(out_SHV) // DELTA_GROUP_TOKENS), *size)
            for number, place in plan.groups():
                inputs = (*_cut(tensors, place), states[number])
                out_SHV[place], behind_HDV = _of_group(plan, place, inputs)
                states[number + 1 : number + 2] = behind_HDV  # nothing behind the last group
            return out_SHV, states

        out_SHV, states = attended(run)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, states)
        return out_SHV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan, (gradient_SHV,), (*tensors, states) = ctx.plan, gradients, ctx.saved_tensors
        whole = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors[:4]]
        wide = states.dtype
        whole += [torch.zeros_like(each, dtype=wide) for each in tensors[4:]]
        of_state_HDV = torch.zeros_like(states[0])
        for number, place in plan.groups(is_backward=True):
            cut = [*_cut(tensors, place), states[number]]
            gradients = gradient_SHV[place], of_state_HDV
            of_state_HDV.copy_(_add_gradients(plan, place, cut, gradients, whole))
        return None, *whole[:4], *map(torch.Tensor.type_as, whole[4:], tensors[4:])


def _add_gradients(
    plan: DeltaPlan,
    place: slice,
    inputs: list[Tensor],
    gradients: tuple[Tensor, Tensor],
    whole: Sequence[Tensor],
) -> Tensor:
    """Compute a group again and add its gradients to those of the whole row and of the weights;
    return that of the state in front of it.
    """
    inputs[4:6] = (each.to(inputs[6].dtype) for each in inputs[4:6])
    leaves = [each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        found = _of_group(plan, place, leaves)
    *of_inputs, of_state_HDV = torch.autograd.grad(found, leaves, gradients)
    before = _before(place, inputs[4])
    for total, part, extra in zip(whole[:4], of_inputs, (before, 0, 0, 0), strict=False):
        total[place.start - extra : place.stop] += part
    for total, part in zip(whole[4:], of_inputs[4:], strict=True):
        total += part
    return of_state_HDV


def _before(place: slice, convolution_CW: Tensor) -> int:
    """Tokens in front of a group that its convolution reads."""
    return min(place.start, convolution_CW.shape[1] - 1)


def _cut(tensors: Sequence[Tensor], place: slice) -> list[Tensor]:
    """Return a group's inputs, with the tokens before it that its convolution reads."""
    qkv_SC, *others, convolution_CW, norm_V = tensors
    start = place.start - _before(place, convolution_CW)
    return [qkv_SC[start : place.stop], *(t[place] for t in others), convolution_CW, norm_V]


def _of_group(plan: DeltaPlan, place: slice, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a group's outputs, sHV, and the state behind it, from the one in front of it."""
    qkv_sC, gate_sHV, log_decay_sH, beta_sH, convolution_CW, norm_V, state_HDV = inputs
    heads, wide = plan.heads, log_decay_sH.dtype
    documents_s = plan.documents_S[place.stop - len(qkv_sC) : place.stop]
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
    documents_nc = _chunked_documents(plan.documents_S[place])
    # Whose state is in front of the row does not matter: it is zero there.
    before = plan.documents_S[max(0, place.start - 1)]
    out_sHV, state_HDV = _by_recurrence(tuple(chunks), documents_nc, before, state_HDV)
    return _normed(plan, out_sHV[: len(gate_sHV)], gate_sHV, norm_V), state_HDV


def _convolved(x_sC: Tensor, convolution_CW: Tensor, documents_s: Tensor) -> Tensor:
    """Return each token's channels summed over itself and those before it in its document."""
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
    """Cut tokens into chunks, the last one filled up with zeros: from sHX to nHcX."""
    missing = -len(x_sH) % DELTA_CHUNK_TOKENS
    filled_sH = F.pad(x_sH, (*(0, 0) * (x_sH.ndim - 1), 0, missing)) if missing else x_sH
    return filled_sH.unflatten(0, (-1, DELTA_CHUNK_TOKENS)).transpose(1, 2)


def _chunked_documents(documents_s: Tensor) -> Tensor:
    """Cut tokens' documents into chunks, nc; what fills up the last chunk is of the last document,
    whose state it leaves as it is.
    """
    missing = -len(documents_s) % DELTA_CHUNK_TOKENS
    filled_s = torch.cat((documents_s, documents_s[-1:].expand(missing)))
    return filled_s.unflatten(0, (-1, DELTA_CHUNK_TOKENS))


def _by_recurrence(
    chunks: tuple[Tensor, ...], documents_nc: Tensor, before: Tensor, state_HDV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs, sHV, and the state behind the chunks; ``before``: the document whose state
    is the one in front of them.
    """
    query_nHcD, key_nHcD, value_nHcV, log_decay_nHc, beta_nHc = chunks
    last_n = torch.cat((before[None], documents_nc[:-1, -1]))
    enters_n1c = (documents_nc == last_n[:, None])[:, None]
    is_seen_n1cc = (documents_nc[:, :, None] == documents_nc[:, None]).tril()[:, None]
    # Sums of their own from each token on: differences of the chunk's would round as its size does.
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
    within_nHcc = (query_nHcD @ key_nHcD.mT) * between_nHcc
    query_nHcD, key_nHcD = query_nHcD * from_start_nHc1, key_nHcD * to_end_nHc1
    written_nHcV, states_nHDV, state_HDV = recurrence(
        new_nHcV, read_nHcD, key_nHcD, from_start_nHc1[:, :, -1, 0], state_HDV
    )
    out_nHcV = query_nHcD @ states_nHDV + within_nHcc @ written_nHcV
    return out_nHcV.transpose(1, 2).flatten(0, 1), state_HDV


def _normed(plan: DeltaPlan, out_sHV: Tensor, gate_sHV: Tensor, norm_V: Tensor) -> Tensor:
    """Return outputs with their heads' root mean square taken away, weighted and gated."""
    scale_sH1 = (out_sHV.square().mean(-1, keepdim=True) + plan.norm_epsilon).rsqrt()
    gated_sHV = out_sHV * scale_sH1 * norm_V * F.silu(gate_sHV.to(out_sHV.dtype))
    return gated_sHV.to(gate_sHV.dtype)
