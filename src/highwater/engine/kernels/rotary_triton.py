"""Triton kernels of rotary.py: one program per token, or per partial sum of a weight's gradient.

Shapes:  T tokens  H heads  D head size  P partial sums of the weight's gradient
"""

import triton
import triton.language as tl
from torch import Tensor

_WARP_NUMBERS = 512
"""Numbers of one half of all heads that each warp computes."""


def rotate(
    x_THD: Tensor,
    weight_D: Tensor | None,
    eps: float,
    cosines_TD: Tensor,
    sines_TD: Tensor,
    out_THD: Tensor,
    scales_TH: Tensor | None,
) -> None:
    """Write ``rotary.rotate``'s results into ``out_THD`` and ``scales_TH``."""
    tokens, heads, size = x_THD.shape
    if not tokens:
        return
    _rotary_forward_kernel[(tokens,)](
        x_THD,
        weight_D,
        cosines_TD,
        sines_TD,
        out_THD,
        scales_TH,
        *x_THD.stride()[:2],
        *(t.stride(0) for t in (cosines_TD, sines_TD)),
        eps,
        HEADS=heads,
        HALF=size // 2,
        HAS_NORM=weight_D is not None,
        **_blocks(heads, size // 2),
    )


def backward(
    gradient_THD: Tensor,
    x_THD: Tensor,
    weight_D: Tensor | None,
    scales_TH: Tensor | None,
    cosines_TD: Tensor,
    sines_TD: Tensor,
    x_gradient_THD: Tensor,
    sums_PD: Tensor | None,
) -> None:
    """Write ``rotary.backward``'s results: ``x_gradient_THD``, and P sums into ``sums_PD``."""
    tokens, heads, size = x_THD.shape
    programs = len(sums_PD) if sums_PD is not None else tokens
    if not programs:
        return
    _rotary_backward_kernel[(programs,)](
        gradient_THD,
        x_THD,
        weight_D,
        scales_TH,
        cosines_TD,
        sines_TD,
        x_gradient_THD,
        sums_PD,
        tokens,
        *gradient_THD.stride()[:2],
        *x_THD.stride()[:2],
        *(t.stride(0) for t in (cosines_TD, sines_TD)),
        PROGRAMS=programs if sums_PD is not None else 0,
        HEADS=heads,
        HALF=size // 2,
        HAS_NORM=weight_D is not None,
        **_blocks(heads, size // 2),
    )


def _blocks(heads: int, half: int) -> dict[str, int]:
    block_heads, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    return {
        "BLOCK_HEADS": block_heads,
        "BLOCK_HALF": block_half,
        "num_warps": max(1, min(16, block_heads * block_half // _WARP_NUMBERS)),
    }


@triton.jit
def _rotary_forward_kernel(
    x,
    weight,
    cosines,
    sines,
    out,
    scales,
    x_stride_T,
    x_stride_H,
    cosine_stride,
    sine_stride,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    # Tokens times heads times their size passes 2**31 well within the lengths we train, and so do
    # the heads of unequal documents, which lie a whole batch apart: offsets are 64 bits wide.
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS).to(tl.int64)
    numbers = tl.arange(0, BLOCK_HALF)
    inside = (heads < HEADS)[:, None] & (numbers < HALF)[None, :]
    first = x + token * x_stride_T + heads[:, None] * x_stride_H + numbers[None, :]
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        # Sums of squares over both halves: a block's padding was loaded as zeros and adds nothing.
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)
        tl.store(scales + token * HEADS + heads, scale, mask=heads < HEADS)
        weight_a = tl.load(weight + numbers, mask=numbers < HALF, other=0.0).to(tl.float32)
        weight_b = tl.load(weight + HALF + numbers, mask=numbers < HALF, other=0.0).to(tl.float32)
        a = a * scale[:, None] * weight_a[None, :]
        b = b * scale[:, None] * weight_b[None, :]
    cosine = cosines + token * cosine_stride + numbers
    sine = sines + token * sine_stride + numbers
    cosine_a = tl.load(cosine, mask=numbers < HALF, other=0.0).to(tl.float32)[None, :]
    cosine_b = tl.load(cosine + HALF, mask=numbers < HALF, other=0.0).to(tl.float32)[None, :]
    sine_a = tl.load(sine, mask=numbers < HALF, other=0.0).to(tl.float32)[None, :]
    sine_b = tl.load(sine + HALF, mask=numbers < HALF, other=0.0).to(tl.float32)[None, :]
    target = out + token * (HEADS * 2 * HALF) + heads[:, None] * (2 * HALF) + numbers[None, :]
    tl.store(target, (a * cosine_a - b * sine_a).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (b * cosine_b + a * sine_b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_backward_kernel(
    gradients,
    x,
    weight,
    scales,
    cosines,
    sines,
    x_gradients,
    sums,
    tokens,
    gradient_stride_T,
    gradient_stride_H,
    x_stride_T,
    x_stride_H,
    cosine_stride,
    sine_stride,
    PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    # Heads of unequal documents lie a whole batch apart: 64 bits, as in the forward pass.
    heads = tl.arange(0, BLOCK_HEADS).to(tl.int64)
    numbers = tl.arange(0, BLOCK_HALF)
    in_half = numbers < HALF
    inside = (heads < HEADS)[:, None] & in_half[None, :]
    if HAS_NORM:
        weight_a = tl.load(weight + numbers, mask=in_half, other=0.0).to(tl.float32)[None, :]
        weight_b = tl.load(weight + HALF + numbers, mask=in_half, other=0.0).to(tl.float32)[None, :]
        # Sums of the weight's gradient stay in registers over all tokens of a program and are
        # stored once: no atomic additions, so that the same inputs give the same bits.
        sum_a = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
        sum_b = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
        for turn in range(tl.cdiv(tokens - program, PROGRAMS)):
            token = program + turn * PROGRAMS
            first = x + token * x_stride_T + heads[:, None] * x_stride_H + numbers[None, :]
            scale = tl.load(scales + token * HEADS + heads, mask=heads < HEADS, other=0.0)[:, None]
            unit_a = tl.load(first, mask=inside, other=0.0).to(tl.float32) * scale
            unit_b = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32) * scale
            gradient = (
                gradients
                + token * gradient_stride_T
                + heads[:, None] * gradient_stride_H
                + numbers[None, :]
            )
            a, b = _turned_back(
                gradient,
                cosines + token * cosine_stride,
                sines + token * sine_stride,
                numbers,
                in_half,
                inside,
                HALF,
            )
            sum_a += a * unit_a
            sum_b += b * unit_b
            a = a * weight_a
            b = b * weight_b
            # The part of the gradient along the head itself, which the norm takes away.
            along = (tl.sum(a * unit_a, axis=1) + tl.sum(b * unit_b, axis=1))[:, None] / (2 * HALF)
            target = (
                x_gradients
                + token * (HEADS * 2 * HALF)
                + heads[:, None] * (2 * HALF)
                + numbers[None, :]
            )
            tl.store(
                target, ((a - unit_a * along) * scale).to(x_gradients.dtype.element_ty), mask=inside
            )
            tl.store(
                target + HALF,
                ((b - unit_b * along) * scale).to(x_gradients.dtype.element_ty),
                mask=inside,
            )
        tl.store(sums + program * (2 * HALF) + numbers, tl.sum(sum_a, axis=0), mask=in_half)
        tl.store(sums + program * (2 * HALF) + HALF + numbers, tl.sum(sum_b, axis=0), mask=in_half)
    else:
        # Without a weight there is nothing to sum: a program is a token.
        gradient = (
            gradients
            + program * gradient_stride_T
            + heads[:, None] * gradient_stride_H
            + numbers[None, :]
        )
        a, b = _turned_back(
            gradient,
            cosines + program * cosine_stride,
            sines + program * sine_stride,
            numbers,
            in_half,
            inside,
            HALF,
        )
        target = (
            x_gradients
            + program * (HEADS * 2 * HALF)
            + heads[:, None] * (2 * HALF)
            + numbers[None, :]
        )
        tl.store(target, a.to(x_gradients.dtype.element_ty), mask=inside)
        tl.store(target + HALF, b.to(x_gradients.dtype.element_ty), mask=inside)


@triton.jit
def _turned_back(gradient, cosine, sine, numbers, in_half, inside, HALF: tl.constexpr):
    """Rotate both halves of a gradient back."""
    a = tl.load(gradient, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(gradient + HALF, mask=inside, other=0.0).to(tl.float32)
    cosine_a = tl.load(cosine + numbers, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cosine_b = tl.load(cosine + HALF + numbers, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine_a = tl.load(sine + numbers, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine_b = tl.load(sine + HALF + numbers, mask=in_half, other=0.0).to(tl.float32)[None, :]
    return a * cosine_a + b * sine_b, b * cosine_b - a * sine_a
