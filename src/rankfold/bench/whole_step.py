"""The whole training step of the paper's model, with rankfold on attention or AdamW everywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ..defaults import RECOMMENDED_NAME
from ..lab.graphs import beside
from ..lab.model import Decoder, ModelConfig
from .cases import AttentionCase, Problem
from .contenders import adamw, riemannian
from .timing import Step, measure

# A repeat lasts for a few steps of a large model, so that few repeats settle the median.
_BUDGET = 15.0
BASE = "AdamW everywhere"


@dataclass(frozen=True)
class WholeStep:
    """Milliseconds of a whole step, and its percentage above AdamW everywhere, in that mode."""

    optimizer: str
    mode: str
    momentum: float | None
    ms: float
    percent: float
    peak_bytes: int


def _model(case: AttentionCase, device: torch.device) -> Decoder:
    """The paper's model with the case's attention, and a final norm."""
    sizes = ModelConfig(
        layers=case.layers,
        heads=case.heads,
        kv_heads=case.kv_heads,
        width=case.rows,
        head_width=case.rank,
        feedforward=4 * case.rows,
        final_norm=True,
    )
    return Decoder(sizes, case.vocabulary, device=device)


def _optimizers(
    model: Decoder, device: torch.device, geometry: str | None, momentum: float | None, mode: str
) -> list[Optimizer]:
    """No geometry means AdamW everywhere."""
    if geometry is None:
        return [adamw(model.parameters(), mode, device)]
    problem = Problem(model.attention_parameters(), model.grids())
    others = model.other_parameters()
    return [riemannian(problem, geometry, momentum, mode), adamw(others, mode, device)]


def _update(steps: list[Step], device: torch.device, mode: str) -> Step:
    """All steps: side by side in a graph, which is not kept waiting by the host."""
    if mode == "graph" and len(steps) == 2:
        first, second = steps
        return beside(first, second, device)

    def each() -> None:
        for step in steps:
            step()

    return each


def _time(
    case: AttentionCase,
    start: Decoder,
    device: torch.device,
    geometry: str | None,
    momentum: float | None,
    mode: str,
    repeats: int,
) -> tuple[float, int]:
    model = copy.deepcopy(start)
    optimizers = _optimizers(model, device, geometry, momentum, mode)
    update = _update([optimizer.step for optimizer in optimizers], device, mode)
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(case.vocabulary, case.tokens, generator=generator, device=device)

    def step() -> None:
        model.zero_grad()
        model(tokens).backward()
        update()

    timing = measure(step, mode, device, reset=lambda: None, repeats=repeats, budget=_BUDGET)
    return timing.ms, timing.peak_bytes


def time_whole_steps(
    case: AttentionCase,
    device: torch.device,
    *,
    geometries: Iterable[str],
    momenta: Iterable[float],
    modes: Iterable[str],
    repeats: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[WholeStep]:
    """Each geometry on the attention weights against AdamW everywhere.

    In modes eager and graph: in a graph are the forward pass, the backward pass and both
    optimizers, these on two streams.
    """
    plan: list[tuple[str, str | None, float | None]] = []
    chosen, rates = list(geometries), list(momenta)
    for mode in modes:
        if mode != "compiled":
            plan.append((mode, None, None))
            plan += [
                (mode, geometry, nu)
                for geometry in chosen
                for nu in ([None] if geometry == RECOMMENDED_NAME else rates)
            ]
    rows: list[WholeStep] = []
    start = _model(case, device)
    base = 0.0
    for done, (mode, geometry, nu) in enumerate(plan):
        progress(f"whole step, {geometry or 'AdamW'}, {mode}", done, len(plan))
        ms, peak = _time(case, start, device, geometry, nu, mode, repeats)
        if geometry is None:
            base = ms
        rows.append(WholeStep(geometry or BASE, mode, nu, ms, 100 * (ms / base - 1), peak))
    progress("done", len(plan), len(plan))
    return rows
