"""What is refused, in which words, and that nothing has changed by then.

What only the values of weights and gradients show is in `test_first_step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rankfold import Factor, Grid, RiemannianSGD

from .reference import GEOMETRIES
from .toys import Toy, orthonormal, saying, train, unchanged

COMPLEX = torch.complex64


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(shape))
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


# Factors and grids ------------------------------------------------------------------------------

BAD_FACTORS: dict[str, tuple[Callable[[nn.Parameter], object], tuple[str, ...]]] = {
    "axis beyond": (lambda p: Factor(p, axis=2), ("axis", "last two", "(8, 6), float32", "got 2")),
    "axis before": (lambda p: Factor(p, axis=-3), ("axis", "last two", "got -3")),
    "blocks": (lambda p: Factor(p, axis=0, blocks=3), ("3 blocks do not divide", "8", "(8, 6)")),
    "blocks after start": (
        lambda p: Factor(p, axis=0, blocks=2, start=3),
        ("2 blocks do not divide the 5 elements", "(8, 6)", "from 3 on"),
    ),
    "no blocks": (lambda p: Factor(p, blocks=0), ("blocks", "at least 1", "(8, 6)", "blocks=0")),
    "start": (lambda p: Factor(p, start=6), ("start", "6 elements", "(8, 6)", "start=6")),
    "negative start": (lambda p: Factor(p, start=-1), ("start", "(8, 6)", "start=-1")),
    "rank": (lambda p: Factor(p, rank=0), ("rank must be at least 1", "rank=0", "(8, 6)")),
    "stride": (
        lambda p: Factor(p, axis=0, rank=3, stride=2, blocks=2),
        ("stride no smaller than rank", "rank=3", "stride=2", "(8, 6)"),
    ),
    "past the end": (
        lambda p: Factor(p, axis=0, rank=3, blocks=3),
        ("3 blocks of rank 3", "run past", "8 elements", "(8, 6)"),
    ),
    "bias of another size": (
        lambda p: Factor(p, axis=0, bias=weight(6)),
        ("bias must have shape (8,)", "(8, 6)", "got a parameter of shape (6,)"),
    ),
    "complex bias": (
        lambda p: Factor(p, axis=0, bias=weight(8, dtype=COMPLEX)),
        ("a bias must be float64, float32, bfloat16 or float16", "(8,), complex64"),
    ),
}


@pytest.mark.parametrize("name", BAD_FACTORS)
def test_factor(name: str) -> None:
    param = weight(8, 6)
    make, words = BAD_FACTORS[name]
    with unchanged([param]), pytest.raises(ValueError, match=saying(*words)):
        make(param)


def test_factor_of_the_wrong_kind() -> None:
    with pytest.raises(ValueError, match=saying("2 or more dimensions", "shape (5,)")):
        Factor(weight(5))
    with pytest.raises(ValueError, match=saying("float64, float32", "(4, 3), complex64")):
        Factor(weight(4, 3, dtype=COMPLEX))
    with pytest.raises(ValueError, match=saying("float64, float32", "(4, 3), int64")):
        Factor(torch.ones(4, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=saying("must be a parameter", "Linear")):
        Factor(nn.Linear(3, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=saying("bias", "two dimensions", "(2, 4, 3)")):
        Factor(weight(2, 4, 3), bias=weight(3))


def test_grid() -> None:
    p, q, wide = weight(8, 6), weight(7, 5), weight(2, 4)
    bad: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (
            lambda: Grid(p, q, name="w"),
            ("grid 'w'", "right[0] has rank 5", "left[0] has 6", "axis=0"),
        ),
        (
            lambda: Grid([p, Factor(q, axis=0)], weight(9, 6)),
            ("cannot form a product", "left[1] has rank 7", "(7, 5)"),
        ),
        (
            lambda: Grid(wide, weight(9, 4), name="w"),
            ("grid 'w'", "rank 4 is above the height 2 of left[0]", "(2, 4)", "axis="),
        ),
        (lambda: Grid(weight(9, 4), wide), ("rank 4", "height 2 of right[0]")),
        (
            lambda: Grid(Factor(p, axis=0, blocks=4), Factor(q, rank=2, blocks=2), groups=4),
            ("2 right blocks", "groups=4"),
        ),
        (lambda: Grid(p, weight(5, 6), groups=0, name="w"), ("grid 'w'", "groups=0")),
        (lambda: Grid([], p, name="w"), ("grid 'w'", "no left factor")),
        (lambda: Grid(p, []), ("no right factor",)),
        (
            lambda: Grid(p, torch.empty(7, 6, device="meta"), name="w"),
            ("grid 'w'", "several devices", "meta"),
        ),
    ]
    for make, words in bad:
        with unchanged([p, q, wide]), pytest.raises(ValueError, match=saying(*words)):
            make()


@pytest.mark.parametrize("name", ["rank", "blocks", "start", "stride", "groups"])
def test_sizes_are_whole_numbers(name: str) -> None:
    w, v = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8, 4))
    build: Callable[..., object] = partial(Factor, w, axis=0)
    if name == "groups":
        build = partial(Grid, w, v)
    with pytest.raises(TypeError, match=saying(f"{name} must be a whole number, got 2.0")):
        build(**{name: 2.0})


def test_the_same_part_of_a_parameter_twice() -> None:
    fused = weight(24, 10)

    def part(start: int, rank: int = 4, axis: int = 0) -> Factor:
        return Factor(fused, axis=axis, rank=rank, blocks=2, start=start)

    for left, right in (
        (part(0), part(4)),
        (part(0), part(7)),
        (part(0), part(0)),
        (part(0), part(0, axis=1)),
    ):
        words = saying("grid 'qk': right[0]", "grid 'qk': left[0]", "same part", "(24, 10)")
        with unchanged([fused]), pytest.raises(ValueError, match=words):
            Grid(left, right, name="qk")
    bias = weight(24)
    shared = Factor(weight(24, 10), axis=0, rank=4, blocks=2, bias=bias)
    biased = Factor(fused, axis=0, rank=4, blocks=2, start=4, bias=bias)
    with pytest.raises(ValueError, match=saying("right[0]", "left[0]", "same part", "(24,)")):
        Grid(shared, biased)

    # Between grids of an optimizer, and then the fused weight as it is meant.
    out = weight(10, 8)
    one = Grid(part(0), part(8), name="qk")
    two = Grid(out, Factor(fused, axis=0, rank=8, start=15), name="vo")
    words = saying("grid 'vo': right[0]", "grid 'qk': right[0]", "same part", "(24, 10)")
    with unchanged([fused, out]), pytest.raises(ValueError, match=words):
        RiemannianSGD([one, two], 0.1, geometry="fixed-quotient")
    three = Grid(out, Factor(fused, axis=0, rank=8, start=16), name="vo")
    optimizer = RiemannianSGD([one, three], 0.1, geometry="fixed-quotient")
    ((fused @ fused.detach().mT).square().sum() + out.square().sum()).backward()
    before = fused.detach().clone()
    with pytest.warns(UserWarning, match="inconsistent"):
        optimizer.step()
    assert (fused != before).any(1).all()


# Construction -----------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(({"lr": lr}, ("lr must be a number", f"got {lr!r}")) for lr in (None, "0.1", [0.1])),
    *(
        ({option: "0.5"}, (f"{option} must be a number, got '0.5'",))
        for option in ("momentum", "second_moment", "growth", "tilt", "weight_decay", "decay_to")
    ),
    *(
        ({option: "0.5"}, (f"{option} must be a number, got '0.5'",))
        for option in ("norm_floor", "damping", "rank_floor", "scale_lr", "trust_region")
    ),
    *(
        ({"lr": lr}, ("lr must be finite and not negative", f"got {lr}"))
        for lr in (-0.1, math.nan, math.inf, -math.inf)
    ),
    *(({"lr": torch.tensor(lr)}, ("lr must be finite",)) for lr in (-1.0, math.nan, math.inf)),
    ({"lr": torch.ones(2)}, ("tensor lr", "shape (2,)")),
    *(
        ({"momentum": nu}, ("momentum must be in [0, 1)", f"got {nu}"))
        for nu in (-0.1, 1.0, 1.5, math.nan, math.inf)
    ),
    *(
        ({"norm_floor": c}, ("norm_floor must be finite and positive", f"got {c}"))
        for c in (0.0, -1.0, math.nan, math.inf)
    ),
    ({"momentum_form": "adam"}, ("momentum_form must be one of", "heavy-ball", "'adam'")),
    ({"momentum_form": "heavy-ball", "momentum": 0.0}, ("heavy-ball", "needs a momentum above 0")),
    ({"bias_correction": True, "momentum": 0.0}, ("bias_correction=True needs a momentum",)),
    (
        {"bias_correction": True, "momentum": 0.5, "momentum_form": "heavy-ball"},
        ("bias_correction is for momentum_form='smoothing'",),
    ),
    (
        {"second_moment": 0.9, "momentum": 0.5, "momentum_form": "unit-smoothing"},
        ("second_moment", "unit-smoothing", "choose one of the two"),
    ),
    *(
        ({"second_moment": beta}, ("second_moment must be in [0, 1)", f"got {beta}"))
        for beta in (-0.1, 1.0, math.nan)
    ),
    *(
        (
            {"second_moment": 0.9, "normalize": normalize, "geometry": "fixed-quotient"},
            ("second_moment", "normalize='metric' or 'spectral'", repr(normalize)),
        )
        for normalize in (None, "schatten-inf")
    ),
    *(
        ({"growth": growth}, ("growth must be finite and not negative", f"got {growth}"))
        for growth in (-0.5, math.nan, math.inf)
    ),
    ({"growth": 0.5, "geometry": "isometry-quotient"}, ("isometry-quotient has no growth",)),
    ({"growth": 0.5, "damping": 0.1}, ("damping", "zero", "growth")),
    ({"damping": 0.1, "geometry": "isometry-embedded"}, ("damping is for products", "orthonormal")),
    ({"tilt": 0.3, "normalize": "whitened"}, ("tilt must be one of 0, 0.125, 0.25, 0.5, 1",)),
    *(
        ({"row_balance": value, "normalize": "whitened"}, ("row_balance must be in [0, 1]",))
        for value in (-0.5, 1.5, math.nan)
    ),
    *(
        ({option: 0.5, **further}, (option, said))
        for option in ("tilt", "row_balance")
        for further, said in (
            ({}, "needs normalize='whitened'"),
            ({"normalize": "whitened", "geometry": "isometry-quotient"}, "fixed-rank"),
        )
    ),
    ({"weight_decay": -0.1}, ("weight_decay must be finite and not negative", "got -0.1")),
    ({"weight_decay": math.inf}, ("weight_decay must be finite", "got inf")),
    ({"weight_decay": 0.1, "decay_to": -1.0}, ("decay_to must be finite and not negative",)),
    ({"decay_to": 1.0}, ("decay_to", "weight_decay", "needs one above 0")),
    ({"weight_decay": 10.0}, ("lr times weight_decay must be below 1", "0.1 · 10.0")),
    (
        {"weight_decay": 0.1, "geometry": "isometry-quotient"},
        ("isometry-quotient has no weight_decay", "isometry"),
    ),
    ({"geometry": "stiefel"}, ("unknown geometry 'stiefel'", *GEOMETRIES)),
    ({"nesterov": True, "momentum": 0.0}, ("nesterov=True needs a momentum above 0",)),
    (
        {"normalize": "frobenius"},
        ("normalize", "'metric', 'spectral', 'schatten-p'", "'frobenius'"),
    ),
    (
        {"retraction": "exp"},
        ("grid 'pair'", "fixed-embedded has no retraction 'exp'", "1×1", "svd, orthographic"),
    ),
    (
        {"geometry": "isometry-embedded", "retraction": "svd"},
        ("grid 'heads'", "no retraction 'svd'", "2×1 members", "polar, qr"),
    ),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    """Refused of the whole optimizer, and of a group added to one, which stays as it was."""
    model, other = Toy(), Toy()
    good: dict[str, Any] = {"lr": 0.1, "geometry": "fixed-embedded"}
    refused = pytest.raises((ValueError, TypeError), match=saying(*words))
    with unchanged(model.parameters()), refused:
        RiemannianSGD(model.grids(), **{**good, **options})
    first = rename(other, "first")
    optimizer = RiemannianSGD(first, **good, momentum=0.5)
    train(other, optimizer, [0])
    with (
        unchanged([*model.parameters(), *other.parameters()], optimizer),
        pytest.raises((ValueError, TypeError), match=saying(*words)),
    ):
        optimizer.add_param_group({"grids": model.grids(), **options})


def rename(model: Toy, name: str) -> list[Grid]:
    grids = model.grids()
    for grid in grids:
        grid.name = f"{name}.{grid.name}"
    return grids


def bad_groups(used: Toy) -> list[tuple[object, type[Exception], tuple[str, ...]]]:
    frozen, tied = Toy(), Toy()
    frozen.k.requires_grad_(False)
    bias = weight(8).requires_grad_(False)
    biased = Factor(weight(8, 6), axis=0, blocks=4, bias=bias)
    branch = weight(6, 2) * 2
    return [
        ([frozen.heads()], ValueError, ("grid 'heads': right[0]", "(4, 5)", "frozen", "trainable")),
        (
            [Grid(biased, Factor(tied.k, axis=0, blocks=2), groups=2, name="b")],
            ValueError,
            ("grid 'b': left[0]", "(8,)", "frozen"),
        ),
        ([Grid(branch, weight(5, 2), name="t")], ValueError, ("'t': left[0]", "not a leaf")),
        (
            [Grid(used.a, weight(9, 2), name="s")],
            ValueError,
            (
                "grid 's': left[0]",
                "(7, 2)",
                "another parameter group",
                "share a group",
                "Grid.rate",
            ),
        ),
        ([tied.pair()], ValueError, ("two grids are named 'pair'", "given twice")),
        ([], ValueError, ("no grids",)),
        (list(tied.parameters()), TypeError, ("expected a rankfold.Grid", "Parameter", "Grid(")),
        ([(tied.a, tied.b)], TypeError, ("expected a rankfold.Grid", "tuple")),
        ([Factor(tied.a)], TypeError, ("expected a rankfold.Grid", "Factor")),
    ]


@pytest.mark.parametrize("case", range(len(bad_groups(Toy()))))
def test_grids_of_a_group(case: int) -> None:
    used = Toy()
    optimizer = RiemannianSGD([used.pair()], 0.1, geometry="fixed-quotient", momentum=0.5)
    train(used, optimizer, [0])
    grids, error, words = bad_groups(used)[case]
    with unchanged(used.parameters(), optimizer), pytest.raises(error, match=saying(*words)):
        optimizer.add_param_group({"grids": grids})
    groups: list[dict[str, Any]] = [{"grids": used.pair()}, {"grids": grids}]
    with unchanged(used.parameters()), pytest.raises(error, match=saying(*words)):
        RiemannianSGD(groups, 0.1, geometry="fixed-quotient")


def test_groups_of_the_wrong_form() -> None:
    model = Toy()
    with pytest.raises(ValueError, match="no grids"):
        RiemannianSGD([], 0.1, geometry="fixed-quotient")
    with pytest.raises(ValueError, match="'grids'"):
        RiemannianSGD([{"params": list(model.parameters())}], 0.1, geometry="fixed-quotient")
    same_name = Grid(weight(4, 2), weight(3, 2), name="pair")
    with pytest.raises(ValueError, match="two grids are named 'pair'"):
        RiemannianSGD(
            [{"grids": model.grids()}, {"grids": [same_name]}], 0.1, geometry="fixed-quotient"
        )


def test_things_that_are_not_grids() -> None:
    a, b = weight(4, 2), weight(3, 2)
    mixed: Any = [{"grids": [Grid(a, b)]}, Grid(weight(4, 2), weight(3, 2))]
    with pytest.raises(TypeError, match="expected a dict with the key 'grids', got Grid"):
        RiemannianSGD(mixed, 0.1, geometry="fixed-quotient")
    model: Any = nn.TransformerEncoderLayer(8, 2)
    for grids in (model, [{"grids": model}]):
        with pytest.raises(
            TypeError, match=saying("got TransformerEncoderLayer", "attention_grids")
        ):
            RiemannianSGD(grids, 0.1, geometry="fixed-quotient")
    nothing: Any = None
    with pytest.raises(TypeError, match="a factor must be a parameter, got NoneType"):
        Grid(nothing, b)
    assert len(RiemannianSGD(Grid(a, b), 0.1, geometry="fixed-quotient").param_groups) == 1


def test_names_made_up_for_grids_clash_with_none_that_were_given() -> None:
    for names in (["grid1", None], [None, "grid0"], [None, None], ["grid0", None, None]):
        grids = [Grid(weight(4, 2), weight(3, 2), name=name) for name in names]
        optimizer = RiemannianSGD(grids, 0.1, geometry="fixed-quotient")
        found = optimizer.param_groups[0]["grid_names"]
        assert len(set(found)) == len(names)
        assert [name for name in found if name in names] == [n for n in names if n is not None]


# Steps ------------------------------------------------------------------------------------------


def spoil_missing(model: Toy) -> None:
    model.k.grad = None


def spoil_frozen(model: Toy) -> None:
    model.k.requires_grad_(False)
    model.k.grad = None


def spoil_sparse(model: Toy) -> None:
    model.q.grad = torch.ones_like(model.q).to_sparse()


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_missing, ("grid 'heads'", "none for right[0]", "(4, 5)", "every factor")),
        (spoil_frozen, ("grid 'heads'", "none for right[0]", "(4, 5)", "was frozen after")),
        (spoil_sparse, ("grid 'heads'", "sparse gradient of left[0]", "(8, 6)")),
    ],
)
def test_gradients_of_the_second_group(
    spoil: Callable[[Toy], None], words: tuple[str, ...], dtype: torch.dtype, steps: int
) -> None:
    """The first group, which has all it needs, is not stepped either."""
    model = Toy(dtype)
    groups = [{"grids": model.pair()}, {"grids": model.heads()}]
    optimizer = RiemannianSGD(groups, 0.1, geometry="isometry-quotient", momentum=0.5)
    train(model, optimizer, range(steps))
    optimizer.zero_grad()
    model.loss(3).backward()
    spoil(model)
    refused = pytest.raises(RuntimeError, match=saying(*words))
    with unchanged(model.parameters(), optimizer), refused:
        optimizer.step()
    model.k.requires_grad_(True)
    train(model, optimizer, [4])  # nothing of it stays behind


def test_missing_gradient_of_a_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (nn.Parameter(orthonormal(6, 4, generator).mT.contiguous()) for _ in range(2))
    bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    grid = Grid(Factor(q, axis=0, blocks=2), Factor(k, axis=0, blocks=2, bias=bias), name="qk")
    optimizer = RiemannianSGD([grid], 0.1, geometry="fixed-quotient")
    (q.mT @ k).square().sum().backward()
    words = saying("grid 'qk'", "none for bias of right[0]", "(4,)")
    with unchanged([q, k, bias], optimizer), pytest.raises(RuntimeError, match=words):
        optimizer.step()


def test_sharded_parameters_are_refused() -> None:
    class Sharded(nn.Parameter):
        placements = ("Shard(0)",)

    left, right = Sharded(torch.randn(6, 2)), nn.Parameter(torch.randn(5, 2))
    with pytest.raises(ValueError, match=r"is sharded .*a step needs whole factors"):
        RiemannianSGD(Grid(left, right), 0.1, geometry="fixed-quotient")


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_default_device_is_nobodys(geometry: str) -> None:
    left, right = (nn.Parameter(torch.linalg.qr(torch.randn(n, 2)).Q) for n in (6, 5))
    optimizer = RiemannianSGD(Grid(left, right), 0.01, geometry=geometry)
    for _ in range(2):
        (left @ right.mT).sum().backward()
        with torch.device("meta"):
            optimizer.step()
    assert left.device.type == "cpu"
    assert not optimizer.counts()
