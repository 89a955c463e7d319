"""What a step costs: operations, memory and products, and what it never does.

Counted where torch dispatches its operations, so that a loop over heads, a matrix m×n or a wait
for the device cannot hide behind a helper.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rankfold
from rankfold import Factor, Grid
from rankfold.geometries import GEOMETRIES, geometry_for
from rankfold.geometries.base import Geometry

from .watching import Denied, Deny, DenyReading, Watch, factors, second_step

every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES)
METHODS = [
    (geometry, shape, retraction)
    for geometry in GEOMETRIES
    for shape in ((1, 1), (2, 3))
    for retraction in geometry_for(geometry, *shape).retractions
]


# No loop over heads or layers --------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "fused": lambda: nn.MultiheadAttention(12, 3),
    "separate": lambda: nn.MultiheadAttention(12, 3, kdim=8, vdim=6, bias=False),
}


def operations(
    layers: int, model: str, geometry: str, dtype: torch.dtype, pairs: Any, backwards: bool = False
) -> Counter[str]:
    """What the second step dispatches, for that many layers alike."""
    generator = torch.Generator().manual_seed(1)
    stack = nn.ModuleList([MODELS[model]() for _ in range(layers)]).to(dtype)
    for param in stack.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator))
    grids = rankfold.attention_grids(stack, pairs=pairs)
    if backwards:  # the weights of the second kind of grid in another order than of the first
        grids = grids[0::2] + grids[1::2][::-1]
    with pytest.warns(UserWarning, match="singular values"):
        rankfold.orthonormalize_(grids)
    optimizer = rankfold.RiemannianSGD(grids, lr=0.01, geometry=geometry, momentum=0.9)
    for param in stack.parameters():
        param.grad = param.detach().clone()  # of ½‖A‖² + ½‖B‖²: consistent when orthonormal
    watch = Watch()
    second_step(optimizer, watch)
    return watch.operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
@every_geometry
def test_as_many_operations_for_24_layers_as_for_2(
    geometry: str, model: str, dtype: torch.dtype
) -> None:
    for pairs in ("qk", "vo", ("qk", "vo")):
        few, many = (operations(n, model, geometry, dtype, pairs) for n in (2, 24))
        assert few == many
        assert sum(few.values()) > 50


@every_geometry
def test_as_many_operations_whatever_the_order(geometry: str) -> None:
    arguments = ("fused", geometry, torch.float32, ("qk", "vo"), True)
    few, many = (operations(n, *arguments) for n in (2, 24))
    assert few == many
    assert few["aten.index_copy_.default"] > 0


@every_geometry
@pytest.mark.parametrize("heads_a_group", [1, 2])
def test_as_many_operations_for_32_heads_as_for_2(geometry: str, heads_a_group: int) -> None:
    counts = []
    for groups in (2, 32):
        heads = groups * heads_a_group
        generator = torch.Generator().manual_seed(1)
        q, k = (torch.randn(h * 4, 8, generator=generator) for h in (heads, groups))
        q, k = nn.Parameter(q), nn.Parameter(k)
        left, right = Factor(q, axis=0, blocks=heads), Factor(k, axis=0, blocks=groups)
        grid = Grid(left, right, groups=groups)
        with pytest.warns(UserWarning, match="singular values"):
            rankfold.orthonormalize_(grid)
        q.grad, k.grad = q.detach() * 1, k.detach() * heads_a_group
        optimizer = rankfold.RiemannianSGD([grid], lr=0.01, geometry=geometry, momentum=0.9)
        watch = Watch()
        second_step(optimizer, watch)
        counts.append(watch.operations)
    assert counts[0] == counts[1]


def test_the_count_sees_a_loop_over_layers() -> None:
    counts = []
    for layers in (2, 3):
        grids = [Grid(*factors(1, 1, 6, 5, 2)) for _ in range(layers)]
        optimizers = [rankfold.RiemannianSGD([g], 0.1, geometry="fixed-embedded") for g in grids]
        for optimizer in optimizers:
            optimizer.step()
        with Watch() as watch:
            for optimizer in optimizers:
                optimizer.step()
        counts.append(sum(watch.operations.values()))
    assert counts[1] * 2 == counts[0] * 3


# No matrix m×n -----------------------------------------------------------------------------------

LARGE, RANK = 200_000, 8

# Run on its own, since memory that pytest once held would hide what a step takes. VmHWM is the peak
# that getrusage reports, less what it inherits from the process this one was started by.
MEMORY = """
    import json
    import torch
    from rankfold import Grid, RiemannianSGD
    from rankfold.geometries import GEOMETRIES
    from tests.watching import factors

    LARGE, RANK = 200_000, 8
    torch.set_num_threads(1)

    def memory(field):
        with open("/proc/self/status") as status:
            return next(int(x.split()[1]) for x in status if x.startswith(field + ":")) * 1024

    extra = {}
    for geometry in GEOMETRIES:
        left, right = factors(1, 1, LARGE, LARGE, RANK, torch.float32)
        optimizer = RiemannianSGD([Grid(left, right)], 0.01, geometry=geometry, momentum=0.9)
        extra[geometry] = []
        for _ in range(2):
            with open("/proc/self/clear_refs", "w") as reset:
                reset.write("5")
            before = memory("VmRSS")
            optimizer.step()
            extra[geometry].append(memory("VmHWM") - before)
    print(json.dumps(extra))
"""


@pytest.fixture(scope="module")
def extra_memory() -> dict[str, list[int]]:
    """Bytes that the first and the second step take beyond what was there, by geometry."""
    # Without the second setting, memory of one step is kept and hides what the next one takes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[int]] = json.loads(ran.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@every_geometry
def test_a_large_step_runs_in_little_memory(
    geometry: str, extra_memory: dict[str, list[int]]
) -> None:
    first, second = extra_memory[geometry]
    factor = 4 * LARGE * RANK
    assert 2 * factor < second < 300e6  # not less than a copy of both factors: it was measured
    assert 2 * factor < first < 300e6


@every_geometry
@pytest.mark.parametrize("normalize", ["metric", "spectral"])
def test_no_tensor_is_larger_than_the_factors_together(geometry: str, normalize: str) -> None:
    left, right = factors(1, 1, LARGE, LARGE, RANK, torch.float32)
    grid = Grid(left, right)
    with Watch() as watch:
        optimizer = rankfold.RiemannianSGD(
            [grid], 0.01, geometry=geometry, momentum=0.9, normalize=normalize
        )
        optimizer.step()
        optimizer.step()
    assert watch.largest < LARGE * LARGE / 100
    assert watch.largest <= 2 * LARGE * RANK


@pytest.mark.parametrize("normalize", ["metric", "spectral"])
@pytest.mark.parametrize(("geometry", "shape", "retraction"), METHODS)
def test_products_grow_with_the_heights_and_the_square_of_the_rank(
    geometry: str, shape: tuple[int, int], retraction: str, normalize: str
) -> None:
    def flops(m: int, n: int, rank: int) -> int:
        optimizer = rankfold.RiemannianSGD(
            [Grid(*factors(*shape, m, n, rank))],
            lr=0.01,
            geometry=geometry,
            momentum=0.9,
            retraction=retraction,
            normalize=normalize,
        )
        counter = FlopCounterMode(display=False)
        second_step(optimizer, counter)
        return int(counter.get_total_flops())

    m, n, rank = 20_000, 16_000, 4
    base = flops(m, n, rank)
    i, j = shape
    assert base <= 30 * (i * m + j * n) * rank**2
    assert flops(2 * m, 2 * n, rank) == pytest.approx(2 * base, rel=0.02)
    # Each side adds for itself, which a term m·n would not.
    more_m, more_n = flops(2 * m, n, rank) - base, flops(m, 2 * n, rank) - base
    assert more_m + more_n == pytest.approx(base, rel=0.02)
    assert flops(m, n, 2 * rank) == pytest.approx(4 * base, rel=0.02)


# No factorization, no synchronisation ------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("geometry", "shape", "retraction", "normalize"),
    [
        (*method, normalize)
        for method in METHODS
        for normalize in ("metric", "spectral", None, "schatten-1", "schatten-inf", "whitened")
    ],
)
@pytest.mark.usefixtures("as_on_a_device")
def test_a_step_is_free_of_factorizations_and_synchronisations(
    geometry: str, shape: tuple[int, int], retraction: str, normalize: str | None, momentum: float
) -> None:
    rates: list[float | Tensor] = [0.01, torch.tensor(0.01)]
    for dtype, lr in itertools.product((torch.float64, torch.bfloat16), rates):
        optimizer = rankfold.RiemannianSGD(
            [Grid(*factors(*shape, 9, 7, 2, dtype))],
            lr=lr,
            geometry=geometry,
            momentum=momentum,
            normalize=normalize,
            retraction=retraction,
        )
        optimizer.step()
        with Deny(), DenyReading():
            optimizer.step()
            optimizer.step()


VIOLATIONS: dict[str, Callable[[Tensor], Any]] = {
    "svd": lambda x: torch.linalg.svd(x.diag_embed()),
    "svdvals": lambda x: torch.linalg.matrix_norm(x.diag_embed(), ord=2),
    "qr": lambda x: torch.linalg.qr(x.diag_embed()),
    "geqrf": lambda x: torch.geqrf(x.diag_embed()),
    "eigh": lambda x: torch.linalg.eigh(x.diag_embed()),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x.diag_embed()),
    "eig": lambda x: torch.linalg.eigvals(x.diag_embed()),
    "lstsq": lambda x: torch.linalg.lstsq(x.diag_embed(), x.diag_embed()),
    "pinv": lambda x: torch.linalg.pinv(x.diag_embed()),
    "cholesky_solve": lambda x: torch.cholesky_solve(x.diag_embed(), x.diag_embed()),
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "branch": lambda x: 1 if x.sum() > 0 else 0,
    "all": lambda x: bool(x.isfinite().all()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("violation", VIOLATIONS.values(), ids=VIOLATIONS)
def test_the_deny_list_finds_what_it_should(
    violation: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = Geometry.norm

    def violating(self: Geometry, frame: Any, coords: Any, kind: str) -> Tensor:
        length = norm(self, frame, coords, kind)
        violation(length)
        return length

    left, right = factors(1, 1, 9, 7, 2)
    optimizer = rankfold.RiemannianSGD([Grid(left, right)], 0.01, geometry="fixed-embedded")
    optimizer.step()
    monkeypatch.setattr(Geometry, "norm", violating)
    with pytest.raises(Denied), Deny(), DenyReading():
        optimizer.step()


@every_geometry
def test_only_the_first_step_looks_at_values(geometry: str) -> None:
    left, right = factors(1, 1, 9, 7, 2)
    optimizer = rankfold.RiemannianSGD([Grid(left, right)], 0.01, geometry=geometry)
    with pytest.raises(Denied), Deny(), DenyReading():
        optimizer.step()


# Retractions that have not converged -------------------------------------------------------------


def distance(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x - y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("geometry", ["fixed-embedded", "isometry-embedded"])
@pytest.mark.parametrize("scale", [30.0, 1e3, 1e6])
def test_a_member_that_has_not_converged_is_counted_and_moves(
    geometry: str, dtype: torch.dtype, scale: float
) -> None:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    members, wild = 4, 2
    a, b = (torch.linalg.qr(draw(members, rows, 3)).Q for rows in (9, 7))
    gradient = 1e-2 * draw(members, 9, 7)
    gradient[wild] *= scale / 1e-2

    def optimize(which: list[int], steps: int) -> tuple[Tensor, dict[str, dict[str, int]]]:
        left, right = (nn.Parameter(x[which].to(dtype)) for x in (a, b))
        grid = Grid(left, right, groups=len(which), name="w")
        optimizer = rankfold.RiemannianSGD(
            [grid], lr=1.0, geometry=geometry, normalize=None, momentum=0.5 if steps > 1 else 0.0
        )
        for step in range(steps):
            ambient = (gradient[which] if step == 0 else 1e-2 * gradient[which].sign()).to(dtype)
            left.grad = ambient @ right.detach()
            right.grad = ambient.mT @ left.detach()
            optimizer.step()
        return (left @ right.mT).detach().double(), optimizer.counts()

    after, counted = optimize(list(range(members)), 1)
    assert counted == {f"w[{wild}]": {"unconverged": 1}}
    assert after.isfinite().all()

    # The tangent vector of the step, and how far the member went along it.
    before, p, q = a @ b.mT, a @ a.mT, b @ b.mT
    tangent = -(p @ gradient + gradient @ q - p @ gradient @ q)
    if geometry == "isometry-embedded":
        overlap = a.mT @ gradient @ b
        tangent = tangent + a @ ((overlap + overlap.mT) / 2) @ b.mT
    length = torch.linalg.matrix_norm(tangent)
    assert (distance(after, before) <= 2 * length)[wild]
    assert distance(after, before)[wild] > 0.1
    # The last iterate is a better approximation of where the step led than staying is.
    assert distance(after, before + tangent)[wild] < length[wild]

    # The others are none the worse for it, and the next step goes on from there.
    rest = [k for k in range(members) if k != wild]
    alone, none = optimize(rest, 1)
    assert none == {}
    assert distance(after[rest], alone).max() <= 100 * torch.finfo(dtype).eps
    assert optimize(list(range(members)), 3)[0].isfinite().all()


@pytest.mark.parametrize("geometry", ["fixed-quotient", "isometry-quotient", "isometry-canonical"])
def test_other_retractions_count_nothing(geometry: str) -> None:
    left, right = factors(1, 1, 9, 7, 2)
    optimizer = rankfold.RiemannianSGD([Grid(left, right)], 30.0, geometry=geometry, normalize=None)
    optimizer.step()
    assert optimizer.counts() == {}


def test_counts_add_up() -> None:
    left, right = factors(1, 1, 9, 7, 2)
    for x in (*left, *right):
        assert x.grad is not None
        x.grad *= 1e3
    grid = Grid(left, right, name="w")
    optimizer = rankfold.RiemannianSGD([grid], 1.0, geometry="fixed-embedded", normalize=None)
    for _ in range(3):
        with torch.no_grad():
            fresh = factors(1, 1, 9, 7, 2)
            left[0].copy_(fresh[0][0])
            right[0].copy_(fresh[1][0])
        optimizer.step()
    assert optimizer.counts() == {"w[0]": {"unconverged": 3}}
