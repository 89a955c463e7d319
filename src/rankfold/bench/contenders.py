"""Who is timed: the ten algorithms, their literal form, and the optimizers people use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..defaults import RECOMMENDED, RECOMMENDED_NAME, recommended
from ..geometries import GEOMETRIES, Pair, StepOptions, geometry_for, is_isometry
from ..optimizer import RiemannianSGD
from .cases import Case, Problem
from .literal import literal_for
from .timing import Step

LR = 0.01
NORMALIZATION = "metric"
NORM_FLOOR = 2**-23
ADAMW = "AdamW (fused)"
OURS = (*GEOMETRIES, RECOMMENDED_NAME)


@dataclass(frozen=True)
class Running:
    """An optimizer on tensors of its own: its step, its weights, and what it keeps."""

    step: Step
    params: list[Tensor]
    state: Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class Contender:
    """One line of the table, before it is measured.

    ``buffers`` is how many tensors of the weights' size its rule reads and writes as state.
    ``theirs`` marks other people's code, whose failure is reported and does not end a run.
    """

    name: str
    mode: str
    momentum: float | None  # None where it is not ours to choose
    buffers: int
    build: Callable[[Problem], Running] = field(repr=False)
    normalization: str = ""
    retraction: str = ""
    orthonormal: bool = False
    theirs: bool = False

    @property
    def floor_factor(self) -> int:
        """Passes over the weights no step can avoid: read, gradient, write, and state twice."""
        return 3 + 2 * self.buffers


@dataclass(frozen=True)
class Field:
    """Everyone who takes part, and why others do not."""

    contenders: list[Contender]
    notes: list[str]


def enlist(
    case: Case,
    *,
    geometries: Iterable[str],
    momenta: Iterable[float],
    modes: Iterable[str],
    literal: bool = True,
    rivals: bool = True,
) -> Field:
    """The contenders of one run; eager AdamW is always the first, for the ratios."""
    modes, momenta, notes = list(modes), list(momenta), []
    found = [_adamw(mode) for mode in dict.fromkeys(["eager", *modes])]
    if rivals:
        found += [_muon(mode) for mode in modes if mode != "compiled"]
        for name, make in (("geoopt", _geoopt), ("peft.optimizers.riemannian", _peft)):
            if not _installed(name):
                notes.append(f"{name} is not installed and was left out")
            elif name != "geoopt" and (case.lefts, case.rights) != (1, 1):
                notes.append(f"{name} has no grids of shared factors and was left out")
            elif "eager" in modes:
                found += make(momenta)
    for geometry in geometries:
        if geometry == RECOMMENDED_NAME:
            found += [_recommended(case, mode) for mode in modes]
            continue
        for momentum in momenta:
            found += [_ours(case, geometry, momentum, mode) for mode in modes]
            if literal and "eager" in modes:
                found.append(_literal(case, geometry, momentum))
    return Field(found, notes)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package a submodule would be in
        return False


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _running(optimizer: Optimizer, params: Iterable[Tensor]) -> Running:
    return Running(optimizer.step, list(params), lambda: _tensors(optimizer))


def _rate(mode: str, device: torch.device) -> float | Tensor:
    """A tensor where a number would be baked into the graph or compiled anew when it changes."""
    return LR if mode == "eager" else torch.tensor(LR, device=device)


def riemannian(
    problem: Problem, geometry: str, momentum: float | None, mode: str = "eager"
) -> RiemannianSGD:
    """The library's optimizer as it is timed; None for the one recommended, which has its own."""
    lr = _rate(mode, problem.params[0].device)
    if momentum is None:
        assert geometry == RECOMMENDED_NAME
        return recommended(problem.grids, lr, capturable=mode != "eager")
    return RiemannianSGD(
        problem.grids,
        lr,
        geometry=geometry,
        momentum=momentum,
        normalize=NORMALIZATION,
        norm_floor=NORM_FLOOR,
        capturable=mode != "eager",
    )


def _ours(case: Case, geometry: str, momentum: float, mode: str) -> Contender:
    return Contender(
        geometry,
        mode,
        momentum,
        buffers=int(momentum > 0),
        build=lambda p: _running(riemannian(p, geometry, momentum, mode), p.params),
        normalization=NORMALIZATION,
        retraction=geometry_for(geometry, case.lefts, case.rights).retractions[0],
        orthonormal=is_isometry(geometry),
    )


def _recommended(case: Case, mode: str) -> Contender:
    """What users get who choose nothing: a momentum, and whitened steps."""
    geometry = geometry_for(RECOMMENDED["geometry"], case.lefts, case.rights)
    return Contender(
        RECOMMENDED_NAME,
        mode,
        None,
        buffers=1,
        build=lambda p: _running(riemannian(p, RECOMMENDED_NAME, None, mode), p.params),
        normalization=RECOMMENDED["normalize"],
        retraction=geometry.retractions[0],
    )


class LiteralSGD:
    """The paper's steps on factors that are stacked already: it pays nothing for layouts."""

    def __init__(self, case: Case, problem: Problem, geometry: str, momentum: float) -> None:
        self.algorithm = literal_for(geometry, case.lefts, case.rights)
        self.point, self.grad = problem.weights(), problem.gradients()
        self.options = StepOptions(
            lr=LR,
            momentum=momentum,
            normalize=NORMALIZATION,
            norm_floor=NORM_FLOOR,
            retraction=geometry_for(geometry, case.lefts, case.rights).retractions[0],
            maximize=False,
        )
        self.state: Any = None

    @torch.no_grad()
    def step(self) -> None:
        """One step, written into the stacks in place."""
        new, self.state = self.algorithm.step(self.point, self.grad, self.state, self.options)
        for old, values in zip(self.point, new, strict=True):
            old.copy_(values)


def _literal(case: Case, geometry: str, momentum: float) -> Contender:
    def build(problem: Problem) -> Running:
        literal = LiteralSGD(case, problem, geometry, momentum)
        return Running(literal.step, list(literal.point), lambda: literal.state or ())

    ours = _ours(case, geometry, momentum, "eager")
    return Contender(
        f"literal {geometry}",
        "eager",
        momentum,
        buffers=ours.buffers,
        build=build,
        normalization=NORMALIZATION,
        retraction=ours.retraction,
        orthonormal=ours.orthonormal,
    )


def adamw(params: Iterable[Tensor], mode: str, device: torch.device) -> AdamW:
    """AdamW at its fastest: fused, or in torch's plain form for the compiler to fuse."""
    if mode == "compiled":
        return AdamW(params, lr=_rate(mode, device))
    return AdamW(params, lr=_rate(mode, device), fused=True, capturable=mode == "graph")


def _adamw(mode: str) -> Contender:
    name = "AdamW" if mode == "compiled" else ADAMW
    return Contender(
        name,
        mode,
        None,
        buffers=2,
        build=lambda p: _running(adamw(p.params, mode, p.params[0].device), p.params),
    )


def _muon(mode: str) -> Contender:
    def build(problem: Problem) -> Running:
        # Muon wants matrices: a weight is one as it is, a stack of factors is taken apart.
        params: list[Tensor] = []
        for param in problem.params:
            assert param.grad is not None  # Case.problem
            pieces = param.detach().flatten(0, -3) if param.dim() > 2 else param.detach()[None]
            grads = param.grad.flatten(0, -3) if param.dim() > 2 else param.grad[None]
            for piece, grad in zip(pieces, grads, strict=True):
                matrix = nn.Parameter(piece.clone())
                matrix.grad = grad.clone()
                params.append(matrix)
        return _running(torch.optim.Muon(params, lr=LR), params)

    return Contender("Muon", mode, None, buffers=1, build=build, theirs=True)


def _geoopt(momenta: list[float]) -> list[Contender]:
    """Every factor on a Stiefel manifold of its own, in one batch a side.

    With the retraction by QR: geoopt's default, a Cayley transform, solves with m×m matrices.
    """

    def build(problem: Problem, momentum: float) -> Running:
        geoopt = importlib.import_module("geoopt")
        params = []
        for weight, grad in zip(problem.weights(), problem.gradients(), strict=True):
            param = geoopt.ManifoldParameter(weight, manifold=geoopt.EuclideanStiefel())
            param.grad = grad
            params.append(param)
        optimizer = geoopt.optim.RiemannianSGD(params, lr=LR, momentum=momentum)
        return _running(optimizer, params)

    return [
        Contender(
            "geoopt RiemannianSGD",
            "eager",
            momentum,
            buffers=int(momentum > 0),
            build=partial(build, momentum=momentum),
            retraction="qr",
            orthonormal=True,
            theirs=True,
        )
        for momentum in momenta
    ]


class _Adapter(nn.Module):
    """A pair under the names by which PEFT finds LoRA weights."""

    def __init__(self, pair: Pair, grad: Pair) -> None:
        super().__init__()
        self.lora_B = nn.ParameterDict({"default": pair.left.clone()})
        self.lora_A = nn.ParameterDict({"default": pair.right.mT.clone()})
        self.lora_B["default"].grad = grad.left.clone()
        self.lora_A["default"].grad = grad.right.mT.clone()


def _peft(_: list[float]) -> list[Contender]:
    def build(problem: Problem) -> Running:
        optimizers = importlib.import_module("peft.optimizers.riemannian")
        weights, grads = problem.weights(), problem.gradients()
        model = nn.ModuleList(
            _Adapter(Pair(weights.left[k, 0], weights.right[k, 0]), Pair(left[0], right[0]))
            for k, (left, right) in enumerate(zip(*grads, strict=True))
        )
        params: list[Tensor] = list(model.parameters())
        optimizer = optimizers.create_riemannian_optimizer(model, AdamW, lr=LR, fused=True)
        working = [p.grad for p in params if p.grad is not None]
        originals = [grad.clone() for grad in working]

        def step() -> None:
            # It multiplies .grad in place, so each step needs the gradients afresh, as training
            # would bring them; beside its own work this copy is nothing.
            torch._foreach_copy_(working, originals)
            optimizer.step()

        return Running(step, params, lambda: _tensors(optimizer))

    return [Contender("PEFT Riemannian AdamW", "eager", None, 2, build, theirs=True)]
