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
def _three(x1, x2, y1, y2, made):
    """The same to 2⁻¹⁶, added to ``made``."""
    made = tl.dot(x2, y1, made)
    made = tl.dot(x1, y2, made)
    return tl.dot(x1, y1, made)


@triton.jit
def split(y, P: tl.constexpr):
    """The right operand of `add_dot`: apart from it, to be made once in front of a loop.

    Inside of one the compiler would hold it in registers, and run out of these.
    """
    if P == "ieee":
        y1, y2, y3 = y, y, y
    else:
        y1, y2, y3 = _split(y)
    return y1, y2, y3


@triton.jit
def add_dot(x, y1, y2, y3, large, small, P: tl.constexpr):
    """``large + small`` plus x y of a y that is split, in the precision P.

    Tensor cores round sums towards zero, so that few and large terms are summed by themselves.
    """
    if P == "ieee":
        large = tl.dot(x, y1, large, input_precision="ieee")
    else:
        x1, x2, x3 = _split(x)
        small = tl.dot(x3, y1, small)
        small = tl.dot(x2, y2, small)
        small = tl.dot(x1, y3, small)
        small = tl.dot(x2, y1, small)
        small = tl.dot(x1, y2, small)
        large = tl.dot(x1, y1, large)
    return large, small


@triton.jit
def add_rough(x, y1, y2, made, P: tl.constexpr):
    """``made`` plus x y of a y that is split, to 2⁻¹⁶: see `rough`."""
    if P == "ieee":
        made = tl.dot(x, y1, made, input_precision="ieee")
    else:
        x1, x2 = _halve(x)
        made = _three(x1, x2, y1, y2, made)
    return made


@triton.jit
def dot_split(x, y1, y2, y3, P: tl.constexpr):
    """x y of a y that is split, in the precision P."""
    if P == "ieee":
        made = tl.dot(x, y1, input_precision="ieee")
    else:
        x1, x2, x3 = _split(x)
        made = _six(x1, x2, x3, y1, y2, y3)
    return made


@triton.jit
def dot(x, y, P: tl.constexpr):
    """x y, in the precision P."""
    y1, y2, y3 = split(y, P)
    return dot_split(x, y1, y2, y3, P)


@triton.jit
def rough(x, y, P: tl.constexpr):
    """x y to 2⁻¹⁶, for corrections: three bfloat16 products of operands split in two."""
    if P == "ieee":
        made = tl.dot(x, y, input_precision="ieee")
    else:
        x1, x2 = _halve(x)
        y1, y2 = _halve(y)
        made = _three(x1, x2, y1, y2, tl.zeros((x.shape[0], y.shape[1]), tl.float32))
    return made


@triton.jit
def change_dot(x, y, square, P: tl.constexpr):
    """x y of a matrix and a change of it, of about the square norm that is given.

    Three products of tensor cores where what they leave out is rounding in the matrix.
    """
    if square < 2.0**-16:
        made = rough(x, y, P)
    else:
        made = dot(x, y, P)
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
