"""What only a GPU can show: no synchronisation, no TF32, the CPU's results, crossing devices."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankfold
from rankfold import workspace
from rankfold.bench.cases import stacked_case
from rankfold.checks import orthonormality_defect
from rankfold.geometries import GEOMETRIES, geometry_for

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch says so whenever the mode is first set.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

ALGORITHMS = [
    (name, grid, retraction)
    for name in GEOMETRIES
    for grid in ((1, 1), (2, 3))
    for retraction in geometry_for(name, *grid).retractions
]


class Problem:
    """Several grids of one shape and a quadratic loss of their products.

    Both sides of square grids have one shape, so that they can go together.
    """

    def __init__(
        self, grid: tuple[int, int], device: str, dtype: torch.dtype, members: int = 3
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        n = 64 if grid[0] == grid[1] else 48

        def orthonormal(rows: int) -> nn.Parameter:
            random = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
            return nn.Parameter(torch.linalg.qr(random).Q.to(device, dtype))

        self.sides = [
            ([orthonormal(64) for _ in range(grid[0])], [orthonormal(n) for _ in range(grid[1])])
            for _ in range(members)
        ]
        shape = (members, *grid, 64, n)
        target = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.target = target.to(device, dtype)
        self.grids = [rankfold.Grid(left, right) for left, right in self.sides]

    def backward(self) -> None:
        products = [
            torch.stack([torch.stack([a @ b.T for b in r]) for a in left]) for left, r in self.sides
        ]
        (torch.stack(products) - self.target).square().sum().backward()

    def products(self) -> Tensor:
        return torch.stack(
            [
                a.detach().double() @ b.detach().double().T
                for left, right in self.sides
                for a in left
                for b in right
            ]
        ).cpu()


def optimizer_for(
    problem: Problem, algorithm: tuple[Any, ...], **changes: Any
) -> rankfold.RiemannianSGD:
    name, _, retraction = algorithm
    values: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "retraction": retraction}
    return rankfold.RiemannianSGD(problem.grids, geometry=name, **{**values, **changes})


def with_rates(
    problem: Problem, algorithm: tuple[Any, ...], rates: list[Any], **options: Any
) -> rankfold.RiemannianSGD:
    """Grids dealt out to as many groups as there are learning rates."""
    name, _, retraction = algorithm
    groups = [
        {"grids": problem.grids[k :: len(rates)], "lr": lr, "retraction": retraction}
        for k, lr in enumerate(rates)
    ]
    return rankfold.RiemannianSGD(groups, 0.02, geometry=name, **options)


def run(problem: Problem, optimizer: rankfold.RiemannianSGD, steps: int) -> Tensor:
    for _ in range(steps):
        optimizer.zero_grad()
        problem.backward()
        optimizer.step()
    return problem.products()


@pytest.fixture
def sync_errors() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def step_without_waiting(problem: Problem, optimizer: rankfold.RiemannianSGD) -> None:
    """The second one: the first has looked at values."""
    run(problem, optimizer, 1)
    problem.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    assert problem.products().isfinite().all()


SAFEGUARDS: dict[str, Any] = {"gradient_repair": "exact", "trust_region": 0.5}


@pytest.mark.usefixtures("sync_errors")
@pytest.mark.parametrize("safeguards", [{}, SAFEGUARDS], ids=["plain", "safeguards"])
@pytest.mark.parametrize("normalize", ["metric", "spectral", "whitened", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_never_synchronises(
    algorithm: tuple[Any, ...],
    dtype: torch.dtype,
    normalize: str | None,
    safeguards: dict[str, Any],
) -> None:
    problem = Problem(algorithm[1], "cuda", dtype)
    if safeguards and algorithm[0].startswith("fixed"):
        safeguards = {**safeguards, "damping": 1e-6}
    lr = torch.tensor(1e-3, device="cuda")
    optimizer = optimizer_for(problem, algorithm, normalize=normalize, lr=lr, **safeguards)
    step_without_waiting(problem, optimizer)


@pytest.mark.usefixtures("sync_errors")
@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nor_do_groups_with_rates_of_their_own(algorithm: tuple[Any, ...], kind: str) -> None:
    problem = Problem(algorithm[1], "cuda", torch.float32)
    numbers = (1e-3, 2e-3, 5e-3)
    rates = [torch.tensor(x, device="cuda") if kind == "tensor" else x for x in numbers]
    decay = 0.1 if algorithm[0].startswith("fixed") else 0.0
    optimizer = with_rates(problem, algorithm, rates, momentum=0.9, weight_decay=decay)
    step_without_waiting(problem, optimizer)


@pytest.mark.usefixtures("sync_errors")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nor_do_sides(algorithm: tuple[Any, ...]) -> None:
    problem = Problem(algorithm[1], "cuda", torch.float32)
    for k, grid in enumerate(problem.grids):
        grid.sides = (1.0, 0.5 + 0.25 * (k % 2))
    rates = [torch.tensor(1e-3, device="cuda"), torch.tensor(2e-3, device="cuda")]
    optimizer = with_rates(problem, algorithm, rates, momentum=0.9, normalize="whitened")
    step_without_waiting(problem, optimizer)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tf32_settings_change_nothing(algorithm: tuple[Any, ...]) -> None:
    results = []
    for setting in ("highest", "high"):
        problem = Problem(algorithm[1], "cuda", torch.float32)
        optimizer = optimizer_for(problem, algorithm)
        for _ in range(4):
            optimizer.zero_grad()
            problem.backward()
            torch.set_float32_matmul_precision(setting)
            try:
                optimizer.step()
                assert torch.get_float32_matmul_precision() == setting
            finally:
                torch.set_float32_matmul_precision("highest")
        results.append(problem.products())
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("normalize", ["metric", "spectral"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gpu_agrees_with_the_cpu(algorithm: tuple[Any, ...], normalize: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        problem = Problem(algorithm[1], device, torch.float64)
        found.append(run(problem, optimizer_for(problem, algorithm, normalize=normalize), 5))
    assert (found[0] - found[1]).abs().max() < 1e-10


@pytest.mark.parametrize(("source", "target"), [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_loads_across_devices(source: str, target: str, dtype: torch.dtype) -> None:
    algorithm = ("fixed-embedded", (2, 3), "svd")
    old, new = Problem((2, 3), source, dtype), Problem((2, 3), target, dtype)
    optimizer, other = optimizer_for(old, algorithm), optimizer_for(new, algorithm)
    run(old, optimizer, 3)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    with torch.no_grad():
        for mine, theirs in zip(new.grids, old.grids, strict=True):
            for p, q in zip(mine.params(), theirs.params(), strict=True):
                p.copy_(q)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for state in other.state.values():
        assert all(value.device.type == target for value in state.values())
    difference = run(new, other, 3) - run(old, optimizer, 3)
    assert difference.abs().max() < (1e-10 if dtype == torch.float64 else 1e-2)


def test_grad_scaler_under_float16_autocast() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, dim_feedforward=64, batch_first=True).cuda()
    optimizer = rankfold.RiemannianSGD(
        rankfold.attention_grids(model), 0.02, geometry="fixed-quotient"
    )
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randn(8, 16, 64, device="cuda")
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(x) - x.flip(1)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_nan_gradient_stays_in_its_member(algorithm: tuple[Any, ...]) -> None:
    problem = Problem(algorithm[1], "cuda", torch.float32)
    optimizer = optimizer_for(problem, algorithm)
    run(problem, optimizer, 2)
    before = [[p.detach().clone() for p in grid.params()] for grid in problem.grids]
    optimizer.zero_grad()
    problem.backward()
    spoiled = problem.sides[1][0][0].grad
    assert spoiled is not None
    spoiled[3, 2] = torch.nan
    optimizer.step()
    for k, (grid, old) in enumerate(zip(problem.grids, before, strict=True)):
        same = [torch.equal(p, q) for p, q in zip(grid.params(), old, strict=True)]
        assert all(same) if k == 1 else not any(same)
        assert all(p.isfinite().all() for p in grid.params())
    assert optimizer.counts() == {"grid1[0]": {"skipped": 1}}


def test_a_model_that_moves_takes_its_state_along() -> None:
    problem = Problem((1, 1), "cpu", torch.float32)
    optimizer = optimizer_for(problem, ("fixed-quotient", (1, 1), "additive"))
    run(problem, optimizer, 2)
    for left, right in problem.sides:
        for param in (*left, *right):
            param.grad = None
            param.data = param.data.cuda()
    problem.target = problem.target.cuda()
    assert run(problem, optimizer, 2).isfinite().all()
    assert all(s["momentum"].is_cuda for s in optimizer.state.values())


@pytest.mark.parametrize(
    ("momentum", "normalize"),
    [
        (0.0, "metric"),
        (0.9, "metric"),
        (0.9, "schatten-1"),
        (0.9, "schatten-inf"),
        (0.9, "whitened"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_replayed_graph_is_the_step_to_the_last_bit(
    algorithm: tuple[Any, ...], groups: int, dtype: torch.dtype, momentum: float, normalize: str
) -> None:
    problems = [Problem(algorithm[1], "cuda", dtype) for _ in range(2)]
    rates = [[torch.tensor(0.02, device="cuda") for _ in range(groups)] for _ in problems]
    runs = [
        with_rates(
            problem,
            algorithm,
            its,
            momentum=momentum,
            normalize=normalize,
            capturable=True,
        )
        for problem, its in zip(problems, rates, strict=True)
    ]
    parameters = [[p for grid in problem.grids for p in grid.params()] for problem in problems]
    for problem in problems:
        problem.backward()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            runs[0].step()
            runs[1].step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs[1].step()
    for k in range(4):
        for its in rates:
            for share, rate in enumerate(its, 1):
                rate.fill_(share * (0.03 - 0.005 * k))
        for one, other in zip(*parameters, strict=True):
            assert one.grad is not None
            assert other.grad is not None
            one.grad.copy_(torch.randn_like(one.grad))
            other.grad.copy_(one.grad)
        runs[0].step()
        graph.replay()
        for one, other in zip(*parameters, strict=True):
            assert torch.equal(one, other)
            for name, value in runs[0].state[one].items():
                assert torch.equal(value, runs[1].state[other][name])
    assert runs[0].counts() == runs[1].counts()


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a[0].startswith("isometry")])
def test_isometries_stay_orthonormal_whatever_the_users_precision(
    algorithm: tuple[Any, ...], precision: str
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        problem = Problem(algorithm[1], "cuda", torch.float32)
        run(problem, optimizer_for(problem, algorithm, lr=0.1), 500)
    finally:
        torch.set_float32_matmul_precision(before)
    for grid in problem.grids:
        for param in grid.params():
            assert orthonormality_defect(param.detach()).max() < 1e-6


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_step_takes_three_times_the_factors_at_most(
    geometry: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_WORKSPACE_BYTES", 1)
    case = stacked_case(32, 4096, 4096, 128)
    problem = case.problem(torch.device("cuda"), orthonormal=True)
    optimizer = rankfold.RiemannianSGD(problem.grids, 0.01, geometry=geometry, momentum=momentum)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 3 * problem.bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_on_a_device_that_is_not_the_current_one(algorithm: tuple[Any, ...]) -> None:
    problems = [Problem(algorithm[1], device, torch.float32) for device in ("cuda:0", "cuda:1")]
    one, other = (run(problem, optimizer_for(problem, algorithm), 3) for problem in problems)
    assert torch.equal(one, other)
