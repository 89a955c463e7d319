"""What a step computes in, whatever the user has set globally, and that the setting survives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankfold import Factor, Grid, RiemannianSGD

from .reference import GEOMETRIES
from .toys import Toy, clones, orthonormal, same_bits, train, unchanged

WORKING = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
BACKENDS: Any = torch.backends  # torch sets these properties where type checkers do not look
CUDA, MKLDNN = BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul


def build(model: Toy, lr: float = 0.125, **options: Any) -> RiemannianSGD:
    return RiemannianSGD(model.grids(), lr, **{"geometry": "fixed-embedded", **options})


# The user's switches ----------------------------------------------------------------------------


def assign(owner: Any, value: str) -> Callable[[], None]:
    return lambda: setattr(owner, "fp32_precision", value)


def both(*settings: Callable[[], None]) -> Callable[[], None]:
    def apply() -> None:
        for setting in settings:
            setting()

    return apply


SETTINGS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "set high": lambda: torch.set_float32_matmul_precision("high"),
    "set medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(CUDA, "allow_tf32", True),
    "all tf32": assign(BACKENDS, "tf32"),
    "all bf16": assign(BACKENDS, "bf16"),
    "all ieee": assign(BACKENDS, "ieee"),
    "cuda tf32": assign(CUDA, "tf32"),
    "mkldnn tf32": assign(MKLDNN, "tf32"),
    "mkldnn bf16": assign(MKLDNN, "bf16"),
    "all but cuda": both(assign(BACKENDS, "tf32"), assign(CUDA, "ieee")),
    "all but mkldnn": both(assign(BACKENDS, "tf32"), assign(MKLDNN, "ieee")),
    "all alike": both(*(assign(owner, "tf32") for owner in (BACKENDS, CUDA, MKLDNN))),
    "two ways": both(assign(BACKENDS, "bf16"), assign(MKLDNN, "tf32")),
}


def readings() -> dict[str, object]:
    """Every way to ask for the precision of a float32 product; torch refuses some mixtures."""

    def ask(question: Callable[[], object]) -> object:
        try:
            return question()
        except RuntimeError as refusal:
            return str(refusal)

    return {
        "all": ask(lambda: BACKENDS.fp32_precision),
        "cuda": ask(lambda: CUDA.fp32_precision),
        "mkldnn": ask(lambda: MKLDNN.fp32_precision),
        "allow_tf32": ask(lambda: CUDA.allow_tf32),
        "set": ask(torch.get_float32_matmul_precision),
    }


def forget_settings() -> None:
    torch.set_float32_matmul_precision("highest")
    for owner in (BACKENDS, CUDA, MKLDNN):
        assign(owner, "none")()


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Iterator[str]:
    """A global precision, undone afterwards."""
    pristine = readings()
    SETTINGS[request.param]()
    yield request.param
    forget_settings()
    assert readings() == pristine


class Witness(TorchDispatchMode):
    """Notes, at every operation on floating-point tensors, its dtypes and the switches."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.dtypes: set[torch.dtype] = set()
        self.switches: set[tuple[str, str]] = set()
        self.autocast = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if name.startswith(("mm", "bmm", "addmm", "baddbmm", "linalg", "matmul")):
            self.products += 1
            self.dtypes |= {x.dtype for x in args if isinstance(x, Tensor)}
            self.switches.add((CUDA.fp32_precision, MKLDNN.fp32_precision))
            self.autocast |= torch.is_autocast_enabled("cpu")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_products_are_float32_whatever_was_set(geometry: str, setting: str) -> None:
    """Seen from inside the step; before and after it the settings are the user's."""
    model = Toy()
    optimizer = build(model, geometry=geometry, momentum=0.5, normalize="spectral")
    chosen = readings()
    for step in range(2):  # the first one also looks at the values
        model.loss(step).backward()
        with Witness() as witness:
            optimizer.step()
        assert readings() == chosen
        assert witness.products > 20
        assert witness.switches <= set(itertools.product(("ieee", "none"), repeat=2))
        assert witness.dtypes <= {torch.float32, torch.float64}


def test_an_inherited_setting_stays_inherited(setting: str) -> None:
    """A wider setting that is changed after a step reaches as far as it would have before it."""
    answers = []
    for stepping in (False, True):
        forget_settings()
        SETTINGS[setting]()
        if stepping:
            model = Toy()
            train(model, build(model), [0])
        assign(BACKENDS, "ieee")()
        answers.append(readings())
    assert answers[0] == answers[1]


def test_settings_survive_errors(setting: str) -> None:
    chosen = readings()
    model = Toy()
    with torch.no_grad():
        model.a.mul_(2)
    with pytest.raises(ValueError, match="not orthonormal"):
        build(model, geometry="isometry-quotient")
    assert readings() == chosen
    optimizer = build(model)
    with torch.no_grad():
        model.q[2:4] = 0
    model.loss(0).backward()
    with unchanged(model.parameters(), optimizer), pytest.raises(ValueError, match="full column"):
        optimizer.step()
    assert readings() == chosen


def wide_run(geometry: str) -> list[Tensor]:
    """A run whose products are large enough for a CPU to lower their precision when allowed to."""
    generator = torch.Generator().manual_seed(0)
    a, b = (nn.Parameter(orthonormal(n, 64, generator).float()) for n in (256, 192))
    target = torch.randn(256, 192, generator=generator, dtype=torch.float64)
    optimizer = RiemannianSGD([Grid(a, b)], 0.5, geometry=geometry, momentum=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (a.double() @ b.double().mT * target).sum().backward()
        optimizer.step()
    return [a.detach(), b.detach()]


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, list[Tensor]]:
    return {geometry: wide_run(geometry) for geometry in GEOMETRIES}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_result_does_not_depend_on_the_setting(
    geometry: str, setting: str, plain_runs: dict[str, list[Tensor]]
) -> None:
    assert same_bits(wide_run(geometry), plain_runs[geometry])


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", WORKING)
def test_autocast_does_not_reach_a_step(dtype: torch.dtype, geometry: str) -> None:
    inside, outside = Toy(dtype), Toy(dtype)
    options: dict[str, Any] = {"geometry": geometry, "momentum": 0.5}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer = build(inside, **options)
    reference = build(outside, **options)
    for step in range(3):
        for model in (inside, outside):
            model.zero_grad()
            model.loss(step).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16), Witness() as witness:
            optimizer.step()
            assert torch.is_autocast_enabled("cpu")
        reference.step()
        assert witness.products > 20
        assert not witness.autocast
        assert witness.dtypes <= {torch.float32, torch.float64}
    assert same_bits(inside.parameters(), outside.parameters())


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_default_dtype_does_not_reach_a_step(default: torch.dtype) -> None:
    for geometry, dtype in itertools.product(GEOMETRIES, WORKING):
        ends = []
        for chosen in (torch.float32, default):
            torch.set_default_dtype(chosen)
            try:
                model = Toy(dtype)
                optimizer = build(model, 0.1, geometry=geometry, momentum=0.6)
                train(model, optimizer, range(3))
            finally:
                torch.set_default_dtype(torch.float32)
            states = [v for s in optimizer.state.values() for v in s.values()]
            ends.append([*clones(model), *states])
        assert same_bits(*ends)


@pytest.mark.parametrize("dtype", WORKING)
def test_every_dtype_works_in_its_own_precision(dtype: torch.dtype) -> None:
    """Each run ends as near to the float64 one as its parameters can hold."""
    exact = Toy(torch.float64)
    model = Toy(dtype)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), model.parameters(), strict=True):
            p.copy_(q)  # the same start, and below the same gradients
    optimizers = [build(m, geometry="fixed-quotient", momentum=0.5) for m in (exact, model)]
    for step in range(4):
        for p, q in zip(exact.parameters(), model.parameters(), strict=True):
            generator = torch.Generator().manual_seed(step)
            q.grad = torch.randn(q.shape, generator=generator).to(dtype)
            p.grad = q.grad.double()
        # Gradients of no loss at all: what is looked at on the first step says so.
        looked = pytest.warns(UserWarning, match="inconsistent") if step == 0 else nullcontext()
        with looked:
            for optimizer in optimizers:
                optimizer.step()
    for p, q in zip(exact.parameters(), model.parameters(), strict=True):
        held = optimizers[1].state[q].get("master", q)
        assert held.dtype == WORKING[dtype]
        error = torch.linalg.norm(held.double() - p) / torch.linalg.norm(p)
        assert error < 64 * torch.finfo(WORKING[dtype]).eps
        assert same_bits([q], [held.to(dtype)])


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_mixed_dtypes_in_one_grid(geometry: str) -> None:
    """A bfloat16 factor beside a float32 or float64 one: the grid computes in the widest."""
    for wide in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        full = [nn.Parameter(orthonormal(n, 2, generator)) for n in (7, 5)]
        a = nn.Parameter(full[0].detach().bfloat16())
        b = nn.Parameter(full[1].detach().to(wide))
        target = torch.randn(7, 5, generator=generator, dtype=torch.float64)
        for left, right in ((a, b), full):
            options: dict[str, Any] = {"geometry": geometry, "momentum": 0.5}
            optimizer = RiemannianSGD([Grid(Factor(left), right)], 0.05, **options)
            for _ in range(5):
                optimizer.zero_grad()
                (left.double() @ right.double().mT - target).square().sum().backward()
                with Witness() as witness:
                    optimizer.step()
                assert witness.dtypes <= {torch.float32, torch.float64}
            if left is a:
                assert optimizer.state[a]["master"].dtype == torch.float32
                assert optimizer.state[a]["momentum"].dtype == torch.float32
                assert optimizer.state[b].keys() == {"momentum"}
                assert optimizer.state[b]["momentum"].dtype == wide
        assert (a.dtype, b.dtype) == (torch.bfloat16, wide)
        torch.testing.assert_close(a.double(), full[0], atol=2e-2, rtol=0)
        torch.testing.assert_close(b.double(), full[1], atol=2e-2, rtol=0)
