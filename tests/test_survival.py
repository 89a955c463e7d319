"""Every safeguard, by driving a run into the failure it is for and seeing the run go on."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

import rankfold
from rankfold import Grid, RiemannianSGD
from rankfold.checks import orthonormality_defect
from rankfold.geometries import geometry_for

from .heads import Heads, states
from .reference import FIXED, GEOMETRIES, ISOMETRIES
from .test_cost import METHODS
from .toys import Toy, same_bits, saying, train, unchanged
from .watching import Deny, DenyReading, factors

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
every_fixed = pytest.mark.parametrize("geometry", FIXED)
PAIR_METHODS = [(g, r) for g in GEOMETRIES for r in geometry_for(g, 1, 1).retractions]


# Rank ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["metric", "spectral"])
@every_fixed
def test_collinear_columns_are_lifted(geometry: str, normalize: str) -> None:
    """One column becomes a multiple of another between steps, with nothing left to tell them by."""
    for seed in range(10):
        model = Heads(seed=seed)
        optimizer = RiemannianSGD(
            [model.grid()], 0.05, geometry=geometry, momentum=0.5, normalize=normalize
        )
        model.run(optimizer, 3)
        with torch.no_grad():
            model.a[1, :, 1] = model.a[1, :, 0] * (1 + seed % 3)
        found = model.run(optimizer, 40)
        assert model.survives(geometry)
        assert torch.linalg.svdvals(model.a.detach())[1].min() > 1e-2  # the rank is back
        assert max(found) < 1.2 * found[0]
        assert found[-1] < 0.75 * found[0]
        counted = optimizer.counts()
        assert counted["w[1]"]["lifted"] > 0
        assert "skipped" not in counted["w[1]"]
        assert counted.keys() == {"w[1]"}


@every_fixed
def test_momentum_of_other_weights_is_forgotten_with_a_reset(geometry: str) -> None:
    """Without a norm, momentum from before the columns met is long in the direction they lost."""
    model = Heads()
    optimizer = RiemannianSGD([model.grid()], 0.02, geometry=geometry, momentum=0.5, normalize=None)
    model.run(optimizer, 3)
    with torch.no_grad():
        model.a[1, :, 1] = model.a[1, :, 0]
    optimizer.reset_momentum()
    found = model.run(optimizer, 100)
    assert model.survives(geometry)
    assert found[-1] < 0.7 * found[0]


@every_fixed
def test_a_column_of_zeros_does_not_stop_a_member_for_good(geometry: str) -> None:
    model = Heads()
    optimizer = RiemannianSGD([model.grid()], 0.05, geometry=geometry)
    model.run(optimizer, 3)
    with torch.no_grad():
        model.a[1, :, 1] = 0
    before = model.losses()[1].item()
    model.run(optimizer, 30)
    assert model.losses()[1] < 0.9 * before


def fitted_values(optimizer: RiemannianSGD, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    """The singular values of ``a bᵀ`` after 300 steps of least squares to ``target``."""
    for _ in range(300):
        optimizer.zero_grad()
        (0.5 * (a @ b.mT - target).square().sum()).backward()
        optimizer.step()
    return torch.linalg.svdvals((a @ b.mT).detach().double())[: a.shape[1]]


@pytest.mark.parametrize("retraction", ["svd", "orthographic"])
def test_values_that_vanish_saturate_at_the_floor(retraction: str) -> None:
    """A target of rank 2 fitted with rank 4: two singular values have nothing to live on."""
    torch.manual_seed(0)
    whole = torch.randn(24, 4) @ torch.randn(4, 20)
    u, values, vt = torch.linalg.svd(whole)
    low = u[:, :2] * values[:2] @ vt[:2]
    smallest, floor = {}, 0.02
    for rank_floor in (0.0, floor):
        torch.manual_seed(1)
        a, b = (nn.Parameter(torch.randn(n, 4) / 2) for n in (24, 20))
        optimizer = RiemannianSGD(
            [Grid(a, b, name="w")],
            0.2,
            geometry="fixed-embedded",
            normalize=None,
            momentum=0.5,
            retraction=retraction,
            rank_floor=rank_floor,
        )
        found = fitted_values(optimizer, a, b, low)
        smallest[rank_floor] = (found[-1] / found.square().mean().sqrt()).item()
        if rank_floor:
            torch.testing.assert_close(found[:2], values[:2].double(), rtol=2e-3, atol=0)
            assert optimizer.counts() == {}  # nothing was singular
            # What was kept alive takes up what a new target asks for.
            found = fitted_values(optimizer, a, b, whole)
            torch.testing.assert_close(found, values[:4].double(), rtol=2e-3, atol=0)
    assert smallest[0.0] < 1e-5
    assert floor < smallest[floor] < 1.5 * floor


@pytest.mark.parametrize("retraction", ["svd", "orthographic"])
def test_values_below_the_floor_rise_to_it_and_not_past_it(retraction: str) -> None:
    """σ becomes (σ⁴ + f⁴)^¼, and the smallest grow tenfold at most."""
    u, v = (torch.linalg.qr(torch.randn(n, 4, dtype=torch.float64)).Q for n in (9, 7))
    for smallest in (0.9, 0.3, 0.1, 0.05, 0.02, 0.01):
        values = torch.tensor([1.0, 1.0, 1.0, smallest], dtype=torch.float64)
        a, b = (nn.Parameter(x * values.sqrt()) for x in (u, v))
        optimizer = RiemannianSGD(
            Grid(a, b), 0.1, geometry="fixed-embedded", rank_floor=0.3, retraction=retraction
        )
        a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
        optimizer.step()
        floor = 0.3 * values.square().mean().sqrt()
        found = torch.linalg.svdvals((a @ b.mT).detach())[:4]
        share = floor**2 / (values**2 + floor**2 / 100)
        torch.testing.assert_close(found, values * (1 + share**2) ** 0.25, rtol=1e-10, atol=0)
        wanted = (values**4 + floor**4) ** 0.25
        assert (found <= wanted * (1 + 1e-10)).all()
        assert found[-1] > 0.85 * min(float(wanted[-1]), 7 * smallest)


def test_the_floor_leaves_large_values_alone() -> None:
    plain, floored = Heads(seed=3), Heads(seed=3)
    for model, floor in ((plain, 0.0), (floored, 1e-3)):
        model.run(
            RiemannianSGD([model.grid()], 0.05, geometry="fixed-embedded", rank_floor=floor), 5
        )
    moved = (plain.a - Heads(seed=3).a).norm()
    assert (floored.a - plain.a).norm() < 1e-5 * moved


@every_fixed
def test_zeros_leave_the_other_members_to_train(geometry: str) -> None:
    """Without damping there is no step from zero: that member is skipped, and counted."""
    model = Heads()
    optimizer = RiemannianSGD([model.grid()], 0.05, geometry=geometry, momentum=0.5)
    model.run(optimizer, 3)
    with torch.no_grad():
        model.a[1] = 0
    before = model.losses().detach()
    model.run(optimizer, 30)
    others = [0, 2, 3]
    assert (model.losses()[others] < 0.9 * before[others]).all()
    assert (model.a[1] == 0).all()
    assert model.b.isfinite().all()
    assert optimizer.counts() == {"w[1]": {"skipped": 30}}


@pytest.mark.parametrize(("normalize", "lr"), [("metric", 0.05), ("spectral", 0.05), (None, 0.02)])
@every_fixed
def test_damping_trains_from_a_zero_factor(geometry: str, normalize: str | None, lr: float) -> None:
    """LoRA's start: A random, B zero."""
    for damping in (0.0, 1e-3):
        model = Heads()
        with torch.no_grad():
            model.b.zero_()
        optimizer = RiemannianSGD(
            [model.grid()], lr, geometry=geometry, damping=damping, normalize=normalize
        )
        if damping:
            found = model.run(optimizer, 100)
            assert found[1] < found[0]  # from the first step on
            assert found[-1] < 0.7 * found[0]
            assert optimizer.counts().keys() == set()
            assert torch.linalg.svdvals(model.b.detach()).min() > 1e-2
        else:
            model.backward()
            words = saying("'w[0]'", "right factor 0", "full column rank 2")
            with unchanged(model.parameters(), optimizer), pytest.raises(ValueError, match=words):
                optimizer.step()


@pytest.mark.parametrize("conditions", [(1e6, 1.0), (1.0, 1e6), (1e3, 1e3)])
@pytest.mark.parametrize("repair", ["average", "exact"])
@every_fixed
def test_conditioning_of_a_million_in_float32(
    geometry: str, repair: str, conditions: tuple[float, float]
) -> None:
    model = Heads()
    with torch.no_grad():
        for x, condition in zip(model.parameters(), conditions, strict=True):
            x[..., 1] /= condition
            x.copy_(x @ torch.tensor([[0.6, 0.8], [-0.8, 0.6]]))
    # Additive steps of length 0.02 are far too long for both factors: their product is not small.
    trust_region = 0.5 if geometry == "fixed-quotient" else None
    optimizer = RiemannianSGD(
        [model.grid()],
        0.02,
        geometry=geometry,
        momentum=0.5,
        gradient_repair=repair,
        trust_region=trust_region,
    )
    found = model.run(optimizer, 200)
    assert model.survives(geometry)
    assert max(found) <= found[0]
    assert found[-1] < 0.6 * found[0]


# Learning rates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("normalize", "lr"), [("metric", 0.1), ("spectral", 0.1), (None, 0.05)])
@pytest.mark.parametrize(("geometry", "retraction"), PAIR_METHODS)
def test_learning_rates_a_thousand_times_too_large(
    geometry: str, retraction: str, normalize: str | None, lr: float
) -> None:
    """Fixed ranks have no bound of their own, and take a trust region to stay within reach."""
    ends = {}
    trusts = (None, 1.0) if geometry in FIXED else (None,)
    for trust_region in trusts:
        model = Heads()
        optimizer = RiemannianSGD(
            [model.grid()],
            1e3 * lr,
            geometry=geometry,
            momentum=0.5,
            normalize=normalize,
            retraction=retraction,
            trust_region=trust_region,
        )
        start = model.loss()
        model.run(optimizer, 50)
        assert model.survives(geometry)
        optimizer.param_groups[0]["lr"] = lr
        ends[trust_region] = model.run(optimizer, 150)[-1] / start
        assert model.survives(geometry)
        assert all("skipped" not in c for c in optimizer.counts().values()) or geometry in FIXED
    assert ends[trusts[-1]] < 0.9
    if geometry in FIXED and normalize is None:
        assert ends[None] > 1e3  # what it is a safeguard against


# Gradients of no product -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "normalize", ["metric", "spectral", "whitened", "schatten-inf", "schatten-1"]
)
@pytest.mark.parametrize("geometry", FIXED)
def test_gradients_of_which_nearly_nothing_is_of_the_product(geometry: str, normalize: str) -> None:
    """G_A = δ Z B + A S and G_B = δ ZᵀA − B Sᵀ: of orthonormal factors the mean has no S.

    Down to a share δ of 1e-2 a step goes where the product's own gradient does, and below that it
    is no longer than any other.
    """
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.linalg.qr(torch.randn(m, 4, generator=generator)).Q for m in (24, 20))
    z, s = torch.randn(24, 20, generator=generator), torch.randn(4, 4, generator=generator)

    def moved(share: float, disputed: float, dtype: torch.dtype) -> Tensor:
        left, right = (nn.Parameter(x.to(dtype, copy=True)) for x in (a, b))
        optimizer = RiemannianSGD(Grid(left, right), 0.1, geometry=geometry, normalize=normalize)
        left.grad = (share * z @ b + disputed * a @ s).to(dtype)
        right.grad = (share * z.mT @ a - disputed * b @ s.mT).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of inconsistent gradients
            optimizer.step()
        assert not optimizer.counts()
        return (left.double() @ right.double().mT - a.double() @ b.double().mT).detach()

    exact = moved(1.0, 0.0, torch.float64)
    assert 0.05 < exact.norm() < 0.5
    for share in (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 0.0):
        step = moved(share, 1.0, torch.float32)
        assert step.norm() < 1.2 * exact.norm()
        if share >= 1e-2:
            assert (step - exact).norm() < 0.1 * exact.norm()


class RotaryAttention(nn.Module):
    """Two heads of four, with rotary embeddings and unit queries and keys."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.head_dim = 4
        generator = torch.Generator().manual_seed(seed)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(8, 8, bias=False) for _ in range(4)
        )
        for weight in self.parameters():
            drawn = torch.randn(8, 8, generator=generator)
            weight.data.copy_(torch.linalg.qr(drawn).Q)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0, 0.1])
        first, second = unit(x, dim=-1).chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = 4 * self.rotate(q) @ self.rotate(k).mT
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        result: Tensor = self.o_proj(mixed)
        return result


@pytest.mark.parametrize("repair", ["none", "average", "exact"])
@every_geometry
def test_attention_with_rotary_embeddings_and_normed_queries_trains(
    geometry: str, repair: str
) -> None:
    student, teacher = RotaryAttention(0), RotaryAttention(1)
    x = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(2))
    y = teacher(x).detach()
    grids = rankfold.attention_grids(student, pairs=("qk", "vo"))
    optimizer = RiemannianSGD(grids, 0.05, geometry=geometry, momentum=0.5, gradient_repair=repair)
    found = []
    for step in range(60):
        optimizer.zero_grad()
        loss = (student(x) - y).square().mean()
        loss.backward()
        found.append(loss.item())
        first = pytest.warns(UserWarning, match=saying("qk[0]", "inconsistent", "rotary"))
        with first if step == 0 else nullcontext():
            optimizer.step()
    assert found[-1] < 0.5 * found[0]
    assert all(p.isfinite().all() for p in student.parameters())
    assert optimizer.counts() == {}
    if geometry in ISOMETRIES:
        for p in (student.q_proj.weight, student.k_proj.weight, student.v_proj.weight):
            assert orthonormality_defect(p.view(2, 4, 8).mT).max() < 2e-6


# Long runs, and the rest -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("geometry", ["isometry-quotient"])
def test_ten_thousand_steps_in_bfloat16(geometry: str) -> None:
    model = Heads(torch.bfloat16, members=2)
    optimizer = RiemannianSGD([model.grid()], 0.01, geometry=geometry, momentum=0.9)
    start = model.loss()
    for _ in range(10_000):
        with torch.no_grad():
            a, b = model.a, model.b
            away = a.float() @ b.float().mT - model.target[:, 0].float()
            a.grad, b.grad = (away @ b.float()).bfloat16(), (away.mT @ a.float()).bfloat16()
        optimizer.step()
    assert model.survives(geometry)
    assert model.loss() < 0.9 * start
    assert all(x.isfinite().all() for x in states(optimizer, model))
    if geometry in ISOMETRIES:
        for p in model.parameters():
            assert orthonormality_defect(optimizer.state[p]["master"]).max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_geometry
def test_reset_momentum(geometry: str, dtype: torch.dtype) -> None:
    """The next step is that of an optimizer that has just begun, masters aside."""
    model = Toy(dtype)
    optimizer = RiemannianSGD(model.grids(), 0.05, geometry=geometry, momentum=0.9)
    train(model, optimizer, range(3))
    twin = Toy(dtype)
    twin.load_state_dict(model.state_dict())
    fresh = RiemannianSGD(twin.grids(), 0.05, geometry=geometry, momentum=0.9)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        if dtype == torch.bfloat16:
            fresh.state[other]["master"] = optimizer.state[one]["master"].clone()
    with unchanged(model.parameters()):
        optimizer.reset_momentum()
    kept = {"master"} if dtype == torch.bfloat16 else set()
    assert all(optimizer.state[p].keys() == kept for p in model.parameters())
    for run, made in ((model, optimizer), (twin, fresh)):
        train(run, made, [3, 4])
    assert same_bits(states(optimizer, model), states(fresh, twin))


OPTIONS = [
    ({"damping": -1e-3}, "damping must be finite and not negative, got -0.001"),
    ({"damping": float("nan")}, "damping must be finite"),
    ({"damping": float("inf")}, "damping must be finite"),
    ({"trust_region": 0}, r"trust_region must be None or in \(0, 1\], got 0"),
    ({"trust_region": 2}, "trust_region must be None or in"),
    ({"trust_region": float("nan")}, "trust_region must be None or in"),
    ({"rank_floor": 1.0}, r"rank_floor must be in \[0, 1\), got 1.0"),
    ({"rank_floor": 0.1}, "rank_floor is an option of fixed-embedded alone"),
    ({"gradient_repair": "best"}, "gradient_repair must be one of .* got 'best'"),
    ({"gradient_repair": None}, "gradient_repair must be one of .* got None"),
    ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of .* got 'ignore'"),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RiemannianSGD(Toy().grids(), 0.1, geometry="fixed-quotient", **options)
    optimizer = RiemannianSGD([Toy().pair()], 0.1, geometry="fixed-quotient")
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"grids": [Toy().heads()], **options})


@pytest.mark.parametrize("normalize", ["metric", None])
@pytest.mark.parametrize(("geometry", "shape", "retraction"), METHODS)
@pytest.mark.usefixtures("as_on_a_device")
def test_safeguards_factor_nothing_and_wait_for_nothing(
    geometry: str, shape: tuple[int, int], retraction: str, normalize: str | None
) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        optimizer = RiemannianSGD(
            [Grid(*factors(*shape, 9, 7, 2, dtype))],
            lr=1.0,
            geometry=geometry,
            momentum=0.9,
            normalize=normalize,
            retraction=retraction,
            gradient_repair="exact",
            damping=1e-3 if geometry in FIXED else 0.0,
            trust_region=0.5,
        )
        optimizer.step()
        with Deny(), DenyReading():
            optimizer.step()
            optimizer.step()
