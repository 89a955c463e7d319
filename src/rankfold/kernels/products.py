"""Products of float32 matrices inside of kernels, on tensor cores and yet to float32 accuracy."""

from __future__ import annotations

import triton
import triton.language as tl

# Six bfloat16 products of operands split in three: the accuracy of float32 on tensor cores.
# Triton's interpreter does not know them, and has no tensor cores.
PRECISION = "ieee" if triton.knobs.runtime.interpret else "bf16x6"


@triton.jit
def _leading(x, ROUNDED: tl.constexpr):
    """The 8 leading bits of x, which are a bfloat16 number: the nearest, or towards zero.

    In integers, since a conversion there and back is several times slower.
    """
    bits = x.to(tl.int32, bitcast=True)
    if ROUNDED:
        bits += 0x8000
    return (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _split(x):
    """x as a sum of three bfloat16 numbers, to the last bit; of an infinity, NaN.

    The first may be cut off: what rounding leaves of the second, of either sign, is then the third.
    """
    first = _leading(x, False)
    rest = x - first
    second = _leading(rest, True)
    third = rest - second
    return first.to(tl.bfloat16), second.to(tl.bfloat16), third.to(tl.bfloat16)


@triton.jit
def _halve(x):
    """x as a sum of two bfloat16 numbers, to 2⁻¹⁶."""
    first = _leading(x, True)
    return first.to(tl.bfloat16), (x - first).to(tl.bfloat16)


@triton.jit
def _six(x1, x2, x3, y1, y2, y3):
    """The product of two sums, small terms first, less what float32 would round away."""
    made = tl.dot(x3, y1)
    made = tl.dot(x2, y2, made)
    made = tl.dot(x1, y3, made)
    made = tl.dot(x2, y1, made)
    made = tl.dot(x1, y2, made)
    return tl.dot(x1, y1, made)


@triton.jit
def dot(x, y, P: tl.constexpr):
    """x y, in the precision P."""
    if P == "ieee":
        made = tl.dot(x, y, input_precision="ieee")
    else:
        x1, x2, x3 = _split(x)
        y1, y2, y3 = _split(y)
        made = _six(x1, x2, x3, y1, y2, y3)
    return made


@triton.jit
def rough(x, y, P: tl.constexpr):
    """x y to 2⁻¹⁶, for corrections: three bfloat16 products of operands split in two."""
    if P == "ieee":
        made = tl.dot(x, y, input_precision="ieee")
    else:
        x1, x2 = _halve(x)
        y1, y2 = _halve(y)
        made = tl.dot(x2, y1)
        made = tl.dot(x1, y2, made)
        made = tl.dot(x1, y1, made)
    return made


@triton.jit
def half_gram(x, P: tl.constexpr):
    """H with xᵀx = H + Hᵀ, in the precision P: of the six products four are left."""
    if P == "ieee":
        made = tl.dot(tl.trans(x), 0.5 * x, input_precision="ieee")
    else:
        x1, x2, x3 = _split(x)
        across = tl.trans(x1)
        made = tl.dot(across, x3)
        made = tl.dot(across, x2, made)
        squares = tl.dot(tl.trans(x2), x2)
        made += 0.5 * tl.dot(across, x1, squares)
    return made


@triton.jit
def overlap(x, y, P: tl.constexpr):
    """xᵀ y, in the precision P: operands are split before one is transposed, which is faster."""
    if P == "ieee":
        made = tl.dot(tl.trans(x), y, input_precision="ieee")
    else:
        x1, x2, x3 = _split(x)
        y1, y2, y3 = _split(y)
        made = _six(tl.trans(x1), tl.trans(x2), tl.trans(x3), y1, y2, y3)
    return made
