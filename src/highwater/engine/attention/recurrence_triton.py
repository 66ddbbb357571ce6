"""Triton kernel of recurrence.py: one program for each head and some columns of its state, which
stays in registers from the first chunk to the last.

A product is three TF32 products, which together are about as exact as float32.

Shapes:  n chunks  H heads  c tokens of a chunk  D size of a key head  V size of a value head
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 16
"""Columns of a state that one program computes."""
_WARPS = 4


def sweep(
    a_nHcV: Tensor,
    read_nHcD: Tensor,
    write_nHcD: Tensor,
    added_nHDV: Tensor | None,
    kept_nH: Tensor,
    state_HDV: Tensor,
    y_nHcV: Tensor,
    states_nHDV: Tensor,
    last_HDV: Tensor,
) -> None:
    """Write results to the last three arguments; see ``recurrence._swept``."""
    chunks, heads, tokens, columns = a_nHcV.shape
    size = read_nHcD.shape[-1]
    # The kernel expects a dense last dimension; it takes strides for the others.
    dense = (a_nHcV, read_nHcD, write_nHcD, added_nHDV, state_HDV)
    dense = [t if t is None or t.stride(-1) == 1 else t.contiguous() for t in dense]
    a_nHcV, read_nHcD, write_nHcD, added_nHDV, state_HDV = dense
    with torch.cuda.device(a_nHcV.device):
        _sweep_kernel[(heads, triton.cdiv(columns, _COLUMNS))](
            a_nHcV,
            read_nHcD,
            write_nHcD,
            a_nHcV if added_nHDV is None else added_nHDV,
            kept_nH,
            state_HDV,
            y_nHcV,
            states_nHDV,
            last_HDV,
            *a_nHcV.stride()[:3],
            *read_nHcD.stride()[:3],
            *write_nHcD.stride()[:3],
            *((0, 0, 0) if added_nHDV is None else added_nHDV.stride()[:3]),
            *kept_nH.stride(),
            *state_HDV.stride()[:2],
            chunks,
            size,
            columns,
            IS_BACKWARD=added_nHDV is not None,
            TOKENS=tokens,
            SIZE=max(16, triton.next_power_of_2(size)),
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )


@triton.jit
def _sweep_kernel(
    a,
    read,
    write,
    added,
    kept,
    state,
    y,
    states,
    last,
    a_n,
    a_h,
    a_c,
    read_n,
    read_h,
    read_c,
    write_n,
    write_h,
    write_c,
    added_n,
    added_h,
    added_d,
    kept_n,
    kept_h,
    state_h,
    state_d,
    chunks,
    size,
    columns,
    IS_BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    c, d = tl.arange(0, TOKENS), tl.arange(0, SIZE)
    v = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_d, is_v = d < size, v < columns
    is_x = is_d[:, None] & is_v[None, :]
    x = tl.load(state + head * state_h + d[:, None] * state_d + v[None, :], mask=is_x, other=0.0)
    for step in range(chunks):
        n = (chunks - 1 - step if IS_BACKWARD else step).to(tl.int64)
        place = (n * heads + head) * size * columns
        tl.store(states + place + d[:, None] * columns + v[None, :], x, mask=is_x)
        r = tl.load(
            read + n * read_n + head * read_h + c[:, None] * read_c + d[None, :],
            mask=is_d[None, :],
            other=0.0,
        )
        w = tl.load(
            write + n * write_n + head * write_h + c[None, :] * write_c + d[:, None],
            mask=is_d[:, None],
            other=0.0,
        )
        a_cv = tl.load(
            a + n * a_n + head * a_h + c[:, None] * a_c + v[None, :], mask=is_v[None, :], other=0.0
        )
        found = tl.dot(r, x, input_precision="tf32x3")
        y_cv = a_cv + found if IS_BACKWARD else a_cv - found
        place = (n * heads + head) * TOKENS * columns
        tl.store(y + place + c[:, None] * columns + v[None, :], y_cv, mask=is_v[None, :])
        x *= tl.load(kept + n * kept_n + head * kept_h)
        moved = tl.dot(w, y_cv, input_precision="tf32x3")
        if IS_BACKWARD:
            x -= moved
            x += tl.load(
                added + n * added_n + head * added_h + d[:, None] * added_d + v[None, :],
                mask=is_x,
                other=0.0,
            )
        else:
            x += moved
    tl.store(last + head * size * columns + d[:, None] * columns + v[None, :], x, mask=is_x)
