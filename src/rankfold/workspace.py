"""How many members of a stack a step takes at once: as many as its temporary memory may hold."""

from __future__ import annotations

from functools import cache

import torch

from .eager import constant_when_compiled

_WORKSPACE_BYTES = 2**30
"""What the tall tensors of a step may take at once; a stack of more members goes in chunks."""
_OF_FACTORS = 3
"""On a GPU they may take this many times the factors instead, where that is more: a chunk costs the
host some milliseconds of launches, and products of few members leave multiprocessors idle."""
_OF_DEVICE = 1 / 16
"""But never more than this share of the GPU's memory, which is there for models and activations:
about 9 GB of an H200, 5 of an H100, 1.5 of a card with 24."""

# Copies of a point that a step holds at its peak: point, gradient and what becomes of them; with
# momentum that as well, what it is mixed into, and the new one.
_ALIVE = 5
_ALIVE_WITH_MOMENTUM = 8

# The GNU C library returns freed memory to the system at once, unless a block as large as this has
# been freed before, and none larger counts; then it keeps twice as much.
_FREED_BYTES = 31 * 2**20


@cache
def keep_freed_memory() -> None:
    """Have a CPU's allocator keep what a step frees, for the next chunk and the next step.

    To ask the system for it again takes a page fault for every 4 KiB, up to 40,000 a step and more
    than a third of its time.
    """
    # Freed right away, and never written to.
    torch.empty(_FREED_BYTES, dtype=torch.uint8, device="cpu")


def chunks(members: int, size: int, device: torch.device, momentum: bool) -> list[slice]:
    """All members, of so many bytes of factors each, in runs that stay inside the workspace."""
    alive = _ALIVE_WITH_MOMENTUM if momentum else _ALIVE
    parts = -(-members // max(1, _room(device, members * size) // (alive * size)))
    run = -(-members // parts)
    return [slice(k, min(k + run, members)) for k in range(0, members, run)]


@constant_when_compiled
def _room(device: torch.device, factors: int) -> int:
    """Bytes that a step on a stack of so many bytes of factors may take."""
    if device.type != "cuda":
        return _WORKSPACE_BYTES
    most = int(_OF_DEVICE * _memory_of(device))
    return max(_WORKSPACE_BYTES, min(_OF_FACTORS * factors, most))


@cache
def _memory_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
