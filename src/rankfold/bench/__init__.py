"""Time the ten algorithms, and what is recommended, against other optimizers, in one run.

`run` needs nothing but torch. Tables, plots and the command line are in `rankfold.bench.report` and
`rankfold.cli`. docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ..workspace import keep_freed_memory
from .cases import PRESETS, AttentionCase, Case, stacked_case
from .contenders import ADAMW, OURS, Contender, enlist
from .timing import MODES, Timing, copy_bandwidth, measure
from .whole_step import WholeStep, time_whole_steps

__all__ = [
    "ADAMW",
    "MODES",
    "OURS",
    "PRESETS",
    "AttentionCase",
    "Case",
    "Results",
    "Row",
    "WholeStep",
    "check_modes",
    "default_modes",
    "run",
    "stacked_case",
    "time_contender",
    "time_whole_steps",
]

# No repeat of one contender is begun after so many seconds.
BUDGET = 10.0
MOMENTA = (0.0, 0.9)


@dataclass(frozen=True)
class Row:
    """One contender, measured; sizes are in bytes."""

    case: str
    contender: str
    mode: str
    momentum: float | None
    normalization: str
    retraction: str
    ms: float
    ms_low: float
    ms_high: float
    repeats: int
    steps: int
    ratio: float  # to eager fused AdamW
    graph_ratio: float | None  # to fused AdamW in a graph, for those in a graph
    peak_bytes: int
    state_bytes: int
    floor_bytes: int
    bytes_per_second: float  # the floor over the time
    copy_share: float  # of what a plain copy reaches


@dataclass
class Results:
    """A run: its rows, what it ran on, and who was left out and why."""

    case: Case
    device: torch.device
    copy_bandwidth: float
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def default_modes(device: torch.device) -> tuple[str, ...]:
    """Eager, and graph where there are graphs."""
    return ("eager", "graph") if device.type == "cuda" else ("eager",)


def check_modes(modes: Iterable[str], device: torch.device) -> None:
    """Raise if a mode is unknown, or not to be had on this device."""
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; there are {', '.join(MODES)}")
        if mode == "graph" and device.type != "cuda":
            raise ValueError(f"mode graph needs a CUDA device, not {device}")


def time_contender(
    case: Case, contender: Contender, device: torch.device, repeats: int, budget: float = BUDGET
) -> tuple[Timing, int, int]:
    """The contender's timing on tensors of its own, its weights' bytes, and its state's."""
    problem = case.problem(device, contender.orthonormal)
    running = contender.build(problem)
    start = [param.detach().clone() for param in running.params]

    def reset() -> None:
        with torch.no_grad():
            torch._foreach_copy_(running.params, start)

    timing = measure(
        running.step, contender.mode, device, reset=reset, repeats=repeats, budget=budget
    )
    state = sum(x.numel() * x.element_size() for x in running.state())
    return timing, problem.bytes, state


def run(
    case: Case,
    device: torch.device,
    *,
    geometries: Iterable[str] = OURS,
    momenta: Iterable[float] = MOMENTA,
    modes: Iterable[str] | None = None,
    literal: bool = True,
    rivals: bool = True,
    repeats: int = 20,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Results:
    """Time everyone on the same tensors, one after another; ``progress`` hears who is next."""
    modes = default_modes(device) if modes is None else tuple(modes)
    check_modes(modes, device)
    entered = enlist(
        case,
        geometries=geometries,
        momenta=momenta,
        modes=modes,
        literal=literal,
        rivals=rivals,
    )
    results = Results(case, device, copy_bandwidth(device), notes=list(entered.notes))
    if device.type == "cpu":
        keep_freed_memory()  # as the first of ours does, for those that come before it too
    adamw_ms: dict[str, float] = {}
    total = len(entered.contenders)
    for done, contender in enumerate(entered.contenders):
        progress(f"{contender.name}, {contender.mode}", done, total)
        try:
            timing, weights, state = time_contender(case, contender, device, repeats)
        except RuntimeError as error:
            if not contender.theirs:
                raise
            reason = str(error).partition("\n")[0]
            results.notes.append(f"{contender.name}, {contender.mode}, failed: {reason}")
            continue
        finally:
            # The next one starts with memory to itself, and is not slowed by garbage of this one.
            gc.collect()
        if contender.name == ADAMW:
            adamw_ms[contender.mode] = timing.ms
        results.rows.append(
            _row(case, contender, timing, weights, state, adamw_ms, results.copy_bandwidth)
        )
    progress("done", total, total)
    return results


def _row(
    case: Case,
    contender: Contender,
    timing: Timing,
    weights: int,
    state: int,
    adamw_ms: dict[str, float],
    bandwidth: float,
) -> Row:
    floor = contender.floor_factor * weights
    speed = 1000 * floor / timing.ms
    return Row(
        case=case.name,
        contender=contender.name,
        mode=contender.mode,
        momentum=contender.momentum,
        normalization=contender.normalization,
        retraction=contender.retraction,
        ms=timing.ms,
        ms_low=timing.low,
        ms_high=timing.high,
        repeats=timing.repeats,
        steps=timing.steps,
        ratio=timing.ms / adamw_ms["eager"],
        graph_ratio=timing.ms / adamw_ms["graph"] if contender.mode == "graph" else None,
        peak_bytes=timing.peak_bytes,
        state_bytes=state,
        floor_bytes=floor,
        bytes_per_second=speed,
        copy_share=speed / bandwidth,
    )
