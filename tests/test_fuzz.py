"""Arbitrary sequences of what can happen in a training run, checked after every event.

Steps on gradients of any size, NaNs, partial and missing gradients, new learning rates, reloads,
copies, writes from outside and moves between dtypes: none may leave a weight or a state tensor
that is not finite, an isometry that is not orthonormal, or a parameter of another shape. Moves
between devices need a second device, and are in `test_cuda`.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn

from rankfold import Factor, Grid, RiemannianSGD
from rankfold.checks import orthonormality_defect

from .reference import GEOMETRIES
from .toys import WIDE, orthonormal, same_bits

Sides = tuple[list[Tensor], list[Tensor]]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
RETRACTIONS = {"fixed-embedded": ["svd", "orthographic"]}
RETRACTIONS |= {f"isometry-{metric}": ["polar", "qr"] for metric in ("quotient", "canonical")}
CLUSTERS = ("pair", "fused", "heads", "stack")  # what shares parameters, and gradients with them
SHAPES = {"a": (4, 2), "b": (4, 2), "o": (4, 4), "s": (2, 4, 2), "t": (2, 2, 2)}
SHAPES |= {"q": (8, 3), "q_bias": (8,), "k": (4, 3), "k_bias": (4,)}
SHAPES |= {"qkv": (13, 4)}  # its last row is in no grid
SIZES = [math.prod(shape) for shape in SHAPES.values()]
TOTAL = sum(SIZES)
OPTIONS: dict[str, list[Any]] = {
    "lr": [0.125, 0.625],
    "momentum": [0.0, 0.5, 0.875],
    "normalize": ["metric", "spectral", "whitened", "schatten-inf", None],
    "gradient_repair": ["none", "average", "exact"],
    "trust_region": [None, 0.5],
}


def members(t: Mapping[str, Tensor]) -> dict[str, Sides]:
    """The factors of every member, read by hand from weights, or from indices of their elements."""

    def rows(name: str, head: int) -> Tensor:
        part = slice(2 * head, 2 * head + 2)
        bias = [t[f"{name}_bias"][None, part]] if f"{name}_bias" in t else []
        return torch.cat([t[name][part].mT, *bias])

    found: dict[str, Sides] = {"pair[0]": ([t["a"]], [t["b"]])}
    for h in range(2):
        found[f"fused-qk[{h}]"] = [rows("qkv", h)], [rows("qkv", 2 + h)]
        found[f"fused-vo[{h}]"] = [t["o"][:, 2 * h : 2 * h + 2]], [rows("qkv", 4 + h)]
        found[f"heads[{h}]"] = [rows("q", 2 * h), rows("q", 2 * h + 1)], [rows("k", h)]
        found[f"stack[{h}]"] = [t["s"][h]], [t["t"][h]]
    return found


# Where elements are when all parameters are laid end to end: by parameter, by member.
SPLIT = zip(SHAPES, torch.arange(TOTAL).split(SIZES), strict=True)
PLACES = {name: places.view(SHAPES[name]) for name, places in SPLIT}
OWNED = {m: torch.cat([x.flatten() for x in a + b]) for m, (a, b) in members(PLACES).items()}


class Model(nn.Module):
    """Nine members in five grids, all with orthonormal factors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        flat = torch.ones(TOTAL, dtype=WIDE)
        for lefts, rights in members(PLACES).values():
            for places in lefts + rights:
                flat[places] = orthonormal(places.shape[0], places.shape[1], generator)
        for name, places in PLACES.items():
            self.register_parameter(name, nn.Parameter(flat[places].to(dtype)))

    def grids(self) -> list[Grid]:
        p = dict(self.named_parameters())

        def heads(name: str, blocks: int, **where: Any) -> Factor:
            return Factor(p[name], axis=0, rank=2, blocks=blocks, **where)

        qkv = [heads("qkv", 2, start=start) for start in (0, 4, 8)]
        queries, keys = heads("q", 4, bias=p["q_bias"]), heads("k", 2, bias=p["k_bias"])
        out = Factor(p["o"], axis=1, blocks=2)
        sides = {"fused-qk": (qkv[0], qkv[1]), "fused-vo": (out, qkv[2]), "heads": (queries, keys)}
        grids = [Grid(*pair, groups=2, name=name) for name, pair in sides.items()]
        grids.append(Grid(p["s"], p["t"], groups=2, name="stack"))
        return [*grids, Grid(p["a"], p["b"], name="pair")]

    def products(self, clusters: Sequence[str]) -> Tensor:
        """Every W_ij of some clusters, flattened end to end, in float64."""
        factors = members({name: p.to(WIDE) for name, p in self.named_parameters()})
        chosen = [sides for m, sides in factors.items() if m.startswith(tuple(clusters))]
        pairs = ((x, y) for lefts, rights in chosen for x in lefts for y in rights)
        return torch.cat([(x @ y.mT).flatten() for x, y in pairs])


def working(dtype: torch.dtype) -> torch.dtype:
    return WIDE if dtype == WIDE else torch.float32


def defect(dtype: torch.dtype, stored: bool) -> float:
    """Bound on ‖UᵀU − I‖₂ after a step, and after U is rounded for storage."""
    return max(64 * torch.finfo(working(dtype)).eps, stored * 2 * torch.finfo(dtype).eps)


class Run:
    def __init__(self, model: Model, optimizer: RiemannianSGD) -> None:
        self.model, self.optimizer = model, optimizer
        self.options: dict[str, Any] = optimizer.param_groups[0]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def state(self, param: Tensor, key: str) -> Tensor:
        """In working precision: a master where it is what the weight was rounded from."""
        kept = self.optimizer.state.get(param, {}).get(key)
        weight = param.detach().to(working(param.dtype), copy=True)
        if key == "momentum":
            return torch.zeros_like(weight) if kept is None else kept.to(weight.dtype, copy=True)
        if kept is None or weight.dtype == param.dtype:
            return weight
        return torch.where(kept.to(param.dtype) == param, kept, weight)

    def look(self) -> list[Tensor]:
        """Weights, the masters a step starts from, and momentum, all parameters end to end."""
        params = list(self.model.parameters())
        columns = [[p.detach() for p in params]]
        columns += [[self.state(p, key) for p in params] for key in ("master", "momentum")]
        return [torch.cat([x.flatten() for x in column]) for column in columns]

    def factors(self, key: str = "master") -> dict[str, list[Tensor]]:
        """Masters or plain weights by member, in float64."""
        pairs = self.model.named_parameters()
        named = {n: (self.state(p, key) if key else p.detach()).to(WIDE) for n, p in pairs}
        return {m: [*lefts, *rights] for m, (lefts, rights) in members(named).items()}

    def is_tame(self) -> bool:
        """Whether nothing absurd has happened lately, so that a step of ordinary length is one."""
        spectra = [torch.linalg.svdvals(x) for found in self.factors().values() for x in found]
        calm = bool(self.look()[2].abs().max() < 1e3) and 1e-3 < float(self.options["lr"]) < 2
        return calm and all(s.max() < 8 and s.min() > 2**-4 for s in spectra)


class Events(RuleBasedStateMachine):
    @initialize(data=st.data(), dtype=st.sampled_from(DTYPES))
    def build(self, data: st.DataObject, dtype: torch.dtype) -> None:
        geometry = data.draw(st.sampled_from(GEOMETRIES))
        self.settings = {
            "geometry": geometry,
            "retraction": data.draw(st.sampled_from([None, *RETRACTIONS.get(geometry, [])])),
            **{key: data.draw(st.sampled_from(values)) for key, values in OPTIONS.items()},
        }
        self.isometry = geometry.startswith("isometry")
        self.clock = 0
        model = Model(dtype)
        self.run = Run(model, RiemannianSGD(model.grids(), **self.settings))
        self.identities = [id(p) for p in model.parameters()]
        self.tolerance = dict.fromkeys(OWNED, defect(dtype, stored=True))

    def backward(self, run: Run, scale: float = 1.0, clusters: Sequence[str] = CLUSTERS) -> None:
        generator = torch.Generator().manual_seed(self.clock)
        products = run.model.products(clusters)
        target = torch.randn(products.shape, dtype=WIDE, generator=generator)
        (scale * (products - target).square().sum()).backward()

    @rule(
        scale=st.sampled_from([1.0, 1.0, 1e-30, 1e-12, 1e-5, 1e3, 1e7, 1e10]),
        clusters=st.just(CLUSTERS) | st.sets(st.sampled_from(CLUSTERS), min_size=1).map(sorted),
        to_none=st.booleans(),
    )
    def step_on_gradients(self, scale: float, clusters: Sequence[str], to_none: bool) -> None:
        self.run.optimizer.zero_grad(set_to_none=to_none)
        self.backward(self.run, scale, clusters)
        self.step(self.run, ordinary=scale == 1)

    @rule(place=st.integers(0, TOTAL - 1), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
    def step_on_a_gradient_with_a_bad_element(self, place: int, bad: float) -> None:
        self.run.optimizer.zero_grad()
        self.backward(self.run)
        for name, param in self.run.model.named_parameters():
            assert param.grad is not None
            param.grad[PLACES[name] == place] = bad
        self.step(self.run, ordinary=True, quiet=True)

    @rule(weight=st.sampled_from([0.0, 1.0, 1e6]))
    def step_on_weight_decay(self, weight: float) -> None:
        self.run.optimizer.zero_grad()
        (weight * self.run.model.products(CLUSTERS).square().sum()).backward()
        self.step(self.run)

    @rule()
    def step_on_old_gradients(self) -> None:
        self.step(self.run)

    def step(self, run: Run, *, ordinary: bool = False, quiet: bool = False) -> bool:
        """Step on the gradients that are there; false if the first look at a member refused it.

        After a refusal, of lost rank or of what a move between dtypes rounded, weights are reset.
        """
        params = list(run.model.parameters())
        grads = [p.grad for p in params]
        values = [p.new_zeros(p.shape) if p.grad is None else p.grad.clone() for p in params]
        flat = torch.cat([x.flatten() for x in values])
        absent = torch.tensor([x is None for x in grads]).repeat_interleave(torch.tensor(SIZES))
        idle = {m for m, places in OWNED.items() if absent[places].any()}
        bad = {m for m, places in OWNED.items() if not flat[places].isfinite().all()}
        tame = ordinary and run.is_tame()
        before, events, refused = run.look(), run.optimizer.counts(), False
        with warnings.catch_warnings():
            if quiet or not tame:
                warnings.filterwarnings("ignore", message="the factor gradients of")
            try:
                run.optimizer.step()
            except ValueError:
                refused = True
                assert self.may_be_refused(run)
        for param, grad, value in zip(params, grads, values, strict=True):
            assert param.grad is grad
            assert grad is None or same_bits([grad], [value])
        after, counted = run.look(), run.optimizer.counts()
        times = {m: [c.get(m, {}).get("skipped", 0) for c in (events, counted)] for m in OWNED}
        dropped = {m for m, (earlier, now) in times.items() if now > earlier}
        assert dropped >= bad - idle or refused
        assert not (tame and dropped - bad)
        still = set(OWNED) if refused else idle | dropped
        rest = torch.ones(TOTAL, dtype=torch.bool)
        for member, places in ((m, OWNED[m]) for m in OWNED.keys() - still):
            rest[places] = False
            self.tolerance[member] = defect(run.dtype, stored=False)
            if tame and flat[places].any():
                assert not torch.equal(before[1][places], after[1][places]), member
        kept = 3 if run.options["momentum"] or refused else 2
        assert same_bits([x[rest] for x in before[:kept]], [x[rest] for x in after[:kept]])
        for param in (p for p in params if p.grad is not None and not refused):
            state = run.optimizer.state[param]
            assert ("momentum" in state) == (run.options["momentum"] > 0)
            if param.dtype != working(param.dtype):
                assert torch.equal(state["master"].to(param.dtype), param)
        if refused and run is self.run:
            self.write(run, Run(Model(WIDE), run.optimizer).factors())
        return not refused

    def may_be_refused(self, run: Run) -> bool:
        factors = [x for found in run.factors("").values() for x in found]
        if self.isometry:
            return max(orthonormality_defect(x).item() for x in factors) > 1e-3
        eps = torch.finfo(working(run.dtype)).eps
        return any(s.min() <= 16 * eps * s.max() for s in map(torch.linalg.svdvals, factors))

    @rule(lr=st.sampled_from([0.0, 1e-4, 0.03, 0.125, 0.625, 1e2, 1e6]), tensor=st.booleans())
    def change_learning_rate(self, lr: float, tensor: bool) -> None:
        self.run.options["lr"] = torch.tensor(lr) if tensor else lr

    @rule(momentum=st.sampled_from(OPTIONS["momentum"]))
    def change_momentum(self, momentum: float) -> None:
        self.run.options["momentum"] = momentum

    @rule(dtype=st.sampled_from(DTYPES))
    def move(self, dtype: torch.dtype) -> None:
        if self.run.look()[1].abs().max() < 1e4:
            worst = max(defect(dtype, stored=True), defect(self.run.dtype, stored=True))
            self.tolerance = {m: max(before, worst) for m, before in self.tolerance.items()}
            self.run.model.to(dtype)

    @rule(member=st.sampled_from(sorted(OWNED)), angle=st.floats(0, 6))
    def rotate_a_member_from_outside(self, member: str, angle: float) -> None:
        c, s = math.cos(angle), math.sin(angle)
        turn = torch.tensor([[c, -s], [s, c]], dtype=WIDE)
        if self.run.look()[1].abs().max() < 1e4:
            self.write(self.run, {member: [x @ turn for x in self.run.factors()[member]]})

    def write(self, run: Run, factors: Mapping[str, list[Tensor]]) -> None:
        flat = run.look()[0]
        for member, values in factors.items():
            flat[OWNED[member]] = torch.cat([x.flatten() for x in values]).to(flat.dtype)
            worst = 0.0 if len(factors) == len(OWNED) else self.tolerance[member]
            self.tolerance[member] = max(worst, defect(run.dtype, stored=True))
        with torch.no_grad():
            for name, param in run.model.named_parameters():
                param.copy_(flat[PLACES[name]])

    @rule()
    def save_and_load(self) -> None:
        file = io.BytesIO()
        torch.save(self.run.optimizer.state_dict(), file)
        file.seek(0)
        model = copy.deepcopy(self.run.model)
        try:
            optimizer = RiemannianSGD(model.grids(), **self.settings)
        except ValueError:
            assert self.may_be_refused(self.run)
            return
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        self.carry_on_with(Run(model, optimizer))

    @rule(pickled=st.booleans())
    def copy_everything(self, pickled: bool) -> None:
        both = self.run.model, self.run.optimizer
        twins = pickle.loads(pickle.dumps(both)) if pickled else copy.deepcopy(both)
        self.carry_on_with(Run(*twins))

    def carry_on_with(self, twin: Run) -> None:
        """Both take the same step, to the same bits; the twin stays."""
        for key, value in self.run.options.items():
            assert key in ("params", "grids") or twin.options[key] == value
        for run in (self.run, twin):
            run.optimizer.zero_grad()
            self.backward(run)
            if not self.step(run, quiet=True):
                return
        assert same_bits(self.run.look(), twin.look())
        self.run = twin
        self.identities = [id(p) for p in twin.model.parameters()]

    @invariant()
    def all_is_finite_and_in_shape_and_on_the_manifold(self) -> None:
        self.clock += 1
        params = dict(self.run.model.named_parameters())
        assert [id(p) for p in params.values()] == self.identities
        assert {id(p) for p in self.run.options["params"]} == set(self.identities)
        for name, param in params.items():
            assert (param.shape, param.dtype) == (SHAPES[name], self.run.dtype)
            assert param.isfinite().all(), name
        for weight, state in self.run.optimizer.state.items():
            assert state.keys() <= {"momentum", "master"}
            for key, value in state.items():
                assert (value.shape, value.dtype in (torch.float32, WIDE)) == (weight.shape, True)
                assert value.isfinite().all(), key
        for member, factors in self.run.factors().items() if self.isometry else ():
            for x in factors:
                assert orthonormality_defect(x) <= self.tolerance[member], member


TestEvents = Events.TestCase
TestEvents.settings = settings(
    derandomize=True, deadline=None, max_examples=200, stateful_step_count=20
)
