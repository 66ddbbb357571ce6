"""Recurrence: the state of a gated delta rule, carried from chunk to chunk of tokens.

A chunk writes ``W = U - R S`` and leaves the state ``S' = k S + K^T W``. The backward pass has the
same form from the last chunk to the first, with ``R`` and ``K`` exchanged, so that one sweep serves
both: in one Triton kernel on a GPU, otherwise chunk by chunk in PyTorch.

Shapes:  n chunks  H heads  c tokens of a chunk  D size of a key head  V size of a value head
Source: Yang et al., Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.3.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor


def recurrence(
    new_nHcV: Tensor, read_nHcD: Tensor, key_nHcD: Tensor, kept_nH: Tensor, state_HDV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of chunks, nHcV, the state before each chunk, nHDV, and the state after
    the last, HDV. ``kept_nH``: factor by which a chunk scales the state. All have one dtype.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Recurrence.apply(
        new_nHcV, read_nHcD, key_nHcD, kept_nH, state_HDV
    )
    return found


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        new_nHcV, read_nHcD, key_nHcD, kept_nH, state_HDV = tensors
        written, states, last = _swept(new_nHcV, read_nHcD, key_nHcD, None, kept_nH, state_HDV)
        ctx.save_for_backward(read_nHcD, key_nHcD, kept_nH, written, states)
        return written, states, last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        read_nHcD, key_nHcD, kept_nH, written_nHcV, states_nHDV = ctx.saved_tensors
        of_written, of_states, of_last = gradients
        _, of_read, of_key, of_kept, _ = ctx.needs_input_grad  # none if it crosses a slice
        of_new_nHcV, of_behind_nHDV, of_state_HDV = _swept(
            of_written, key_nHcD, read_nHcD, of_states, kept_nH, of_last
        )
        return (
            of_new_nHcV,
            -(of_new_nHcV @ states_nHDV.mT) if of_read else None,
            written_nHcV @ of_behind_nHDV.mT if of_key else None,
            (states_nHDV * of_behind_nHDV).sum((-2, -1)) if of_kept else None,
            of_state_HDV,
        )


def _swept(
    a_nHcV: Tensor,
    read_nHcD: Tensor,
    write_nHcD: Tensor,
    added_nHDV: Tensor | None,
    kept_nH: Tensor,
    state_HDV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``y = a - read X`` of every chunk, the state X before each chunk, and the state after
    all; each chunk updates X to ``k X + write^T y``. With ``added``, in a backward pass, chunks go
    from the last to the first, signs are exchanged and ``added`` is added to each X.
    """
    y_nHcV = torch.empty_like(a_nHcV, memory_format=torch.contiguous_format)
    states_nHDV = a_nHcV.new_empty(len(a_nHcV), *state_HDV.shape)
    last_HDV = torch.empty_like(state_HDV, memory_format=torch.contiguous_format)
    out = y_nHcV, states_nHDV, last_HDV
    if a_nHcV.is_cuda and a_nHcV.dtype == torch.float32:
        _triton().sweep(a_nHcV, read_nHcD, write_nHcD, added_nHDV, kept_nH, state_HDV, *out)
        return out
    sign, order = (-1, range(len(a_nHcV))) if added_nHDV is None else (1, range(len(a_nHcV))[::-1])
    last_HDV.copy_(state_HDV)
    for chunk in order:
        states_nHDV[chunk] = last_HDV
        torch.add(a_nHcV[chunk], read_nHcD[chunk] @ last_HDV, alpha=sign, out=y_nHcV[chunk])
        last_HDV *= kept_nH[chunk][:, None, None]
        last_HDV.sub_(write_nHcD[chunk].mT @ y_nHcV[chunk], alpha=sign)
        if added_nHDV is not None:
            last_HDV += added_nHDV[chunk]
    return out


def _triton() -> Any:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is missing: it comes with PyTorch's CUDA builds for Linux")
    from highwater.engine.attention import recurrence_triton

    return recurrence_triton
