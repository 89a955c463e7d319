"""Numbers that the host gives to kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def single(x):
    """A number as float32, which it is already where Python launches.

    A compiled step hands Python's floats over as float64, and what these meet would be that, too.
    """
    return tl.cast(x, tl.float32)
