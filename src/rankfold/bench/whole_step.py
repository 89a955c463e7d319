"""The whole training step of the paper's model, with rankfold on attention or AdamW everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

from .cases import AttentionCase, Problem, orthonormalize_quickly
from .contenders import adamw, riemannian
from .timing import measure

# A repeat lasts for a few steps of a large model, so that few repeats settle the median.
_BUDGET = 15.0


@dataclass(frozen=True)
class WholeStep:
    """Milliseconds of a whole step, and its percentage above AdamW everywhere, in that mode."""

    optimizer: str
    mode: str
    momentum: float | None
    ms: float
    percent: float
    peak_bytes: int


class Attention(nn.Module):
    """Causal attention with no biases and no positions: the loss sees products alone."""

    def __init__(self, case: AttentionCase) -> None:
        super().__init__()
        self.rank = case.rank
        self.q, self.k, self.v, self.o = (
            nn.Linear(columns, rows, bias=False) for rows, columns in case.shapes()[:4]
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.rank)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Decoder(nn.Module):
    """The paper's model: RMS norms without weights, squared ReLU, untied embeddings."""

    def __init__(self, case: AttentionCase) -> None:
        super().__init__()
        width = case.rows
        self.width = width
        self.embedding = nn.Embedding(case.vocabulary, width)
        self.attention = nn.ModuleList(Attention(case) for _ in range(case.layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(case.layers))
        self.down = nn.ModuleList(
            nn.Linear(4 * width, width, bias=False) for _ in range(case.layers)
        )
        self.head = nn.Linear(width, case.vocabulary, bias=False)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,))

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of each next token."""
        x = self.embedding(tokens)
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(self._norm(x))
            x = x + down(F.relu(up(self._norm(x))).square())
        logits = self.head(self._norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _build(
    case: AttentionCase, device: torch.device, geometry: str | None, momentum: float, mode: str
) -> tuple[Decoder, list[Optimizer]]:
    """The same model each time, and its optimizers; no geometry means AdamW everywhere."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with device:
            model = Decoder(case)
    attention = [p for layer in model.attention for p in layer.parameters()]
    orthonormalize_quickly(case.grids(attention))  # as the paper does for every optimizer
    model.to(torch.bfloat16)
    if geometry is None:
        return model, [adamw(model.parameters(), mode, device)]
    inside = {id(p) for p in attention}
    others = [p for p in model.parameters() if id(p) not in inside]
    problem = Problem(attention, case.grids(attention))
    return model, [riemannian(problem, geometry, momentum, mode), adamw(others, mode, device)]


def _time(
    case: AttentionCase,
    device: torch.device,
    geometry: str | None,
    momentum: float,
    mode: str,
    repeats: int,
) -> tuple[float, int]:
    model, optimizers = _build(case, device, geometry, momentum, mode)
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(case.vocabulary, case.tokens, generator=generator, device=device)

    def step() -> None:
        model.zero_grad()
        model(tokens).backward()
        for optimizer in optimizers:
            optimizer.step()

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
    optimizers.
    """
    plan: list[tuple[str, str | None, float]] = []
    chosen, rates = list(geometries), list(momenta)
    for mode in modes:
        if mode != "compiled":
            plan.append((mode, None, 0.0))
            plan += [(mode, geometry, nu) for geometry in chosen for nu in rates]
    rows: list[WholeStep] = []
    base = 0.0
    for done, (mode, geometry, nu) in enumerate(plan):
        progress(f"whole step, {geometry or 'AdamW'}, {mode}", done, len(plan))
        ms, peak = _time(case, device, geometry, nu, mode, repeats)
        if geometry is None:
            base = ms
        name, momentum = ("AdamW everywhere", None) if geometry is None else (geometry, nu)
        rows.append(WholeStep(name, mode, momentum, ms, 100 * (ms / base - 1), peak))
    progress("done", len(plan), len(plan))
    return rows
