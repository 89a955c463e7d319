"""CUDA graphs of the parts of a training step, which a GPU replays without waiting for Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_WARM_UP = 3


class Captured:
    """A function of fixed tensors: run as it is a few times, then recorded, then replayed.

    The first calls do real work, so nothing has to be put back before recording. They run on a
    side stream, as recording wants it.
    """

    def __init__(self, run: Callable[[], Tensor | None], device: torch.device) -> None:
        self._run = run
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Tensor | None = None
        self._calls = 0

    def __call__(self) -> Tensor | None:
        """Run or replay; the result is a copy, since the next replay writes into it."""
        self._calls += 1
        if self._calls <= _WARM_UP:
            return self._aside()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with nothing_collected(), torch.cuda.graph(self._graph):
                self._out = self._run()
        self._graph.replay()
        return None if self._out is None else self._out.clone()

    def _aside(self) -> Tensor | None:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            out = self._run()
        current.wait_stream(self._side)
        return out


def free_earlier() -> None:
    """Free the graphs of earlier runs, which are garbage in a cycle.

    Once a run: with all that a compiler leaves in memory it takes half a second.
    """
    gc.collect()


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Freeing a graph would end a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def beside(
    first: Callable[[], object], second: Callable[[], object], device: torch.device
) -> Callable[[], None]:
    """Both, on two streams of a GPU: small kernels of the one fill the gaps of the other."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def both() -> None:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            first()
        second()
        current.wait_stream(side)

    return both
