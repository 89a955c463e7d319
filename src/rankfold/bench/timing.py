"""How a step is timed, how its memory is measured, and how fast the device can copy."""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]

MODES = ("eager", "compiled", "graph")
_WARM_UP = 3
# A repeat is this long at least, so that the clock's resolution and the wait at the end of it do
# not count, and has so few steps that the weights stay near their start.
_REPEAT_SECONDS = 0.02
_MOST_STEPS = 100
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step: median and quartiles over repeats of ``steps`` steps each."""

    ms: float
    low: float
    high: float
    repeats: int
    steps: int
    peak_bytes: int


def measure(
    step: Step,
    mode: str,
    device: torch.device,
    *,
    reset: Callable[[], None],
    repeats: int,
    budget: float,
) -> Timing:
    """Warm up, measure the memory of one step, then time it.

    ``reset`` puts the weights back, outside the clock, before each repeat. No repeat is begun
    after ``budget`` seconds, but one is always made.
    """
    with warnings.catch_warnings():
        # What torch remarks on its own parts while compiling; the library's warnings stay.
        warnings.filterwarnings("ignore", module="torch")
        if mode == "graph":
            run, peak = _capture(step, device)
            one = _warm_up(run, device)
        else:
            run = _compiled(step) if mode == "compiled" else step
            # A first compiled call is slow for a reason that passes; a slow eager one is not.
            one = _warm_up(run, device, budget if mode == "eager" else math.inf)
            peak = peak_bytes(run, device)
    steps = max(1, min(_MOST_STEPS, round(_REPEAT_SECONDS / max(one, 1e-9))))
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < repeats:
        reset()
        times.append(1000 * _seconds(run, steps, device) / steps)
        if time.perf_counter() - began > budget:
            break
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Timing(statistics.median(times), low, high, len(times), steps, peak)


def _warm_up(run: Step, device: torch.device, budget: float = math.inf) -> float:
    """Seconds of the last of a few steps; of the first if that has spent the budget."""
    began = time.perf_counter()
    for _ in range(_WARM_UP):
        one = _seconds(run, 1, device)
        if time.perf_counter() - began > budget:
            break
    return one


def _compiled(step: Step) -> Step:
    # Without this, contenders share the recompilations torch allows one piece of code, and the
    # later ones would silently run in eager mode.
    torch.compiler.reset()
    compiled: Step = torch.compile(lambda: step())
    return compiled


def _capture(step: Step, device: torch.device) -> tuple[Step, int]:
    """The step as a CUDA graph, after the warm-up on a side stream that capturing needs."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            step()

    # What is allocated while capturing is what the graph keeps for its replays.
    peak = peak_bytes(capture, device)
    return graph.replay, peak


def _seconds(run: Step, steps: int, device: torch.device) -> float:
    """Seconds for so many steps, from an idle device to an idle device."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(steps):
            run()
        return time.perf_counter() - began
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(steps):
        run()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / 1000


def peak_bytes(run: Step, device: torch.device) -> int:
    """The most memory ``run`` holds at any time, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Every allocation and release of torch's CPU allocator, in order; the profiler's own remarks
    # on being started would otherwise land in the middle of the progress bar.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    assert seen.profiler is not None
    results = seen.profiler.kineto_results
    assert results is not None
    changes = [event for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that one large copy moves, reading and writing counted."""
    size = _COPY_BYTES.get(device.type, _COPY_BYTES["cpu"])
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> Tensor:
        return target.copy_(source)

    _seconds(copy, 2, device)
    return 2 * size / statistics.median(_seconds(copy, 1, device) for _ in range(7))
