"""The laboratory on a GPU: runs that repeat bit for bit, and CUDA graphs of their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankfold.lab import graphs
from rankfold.lab.config import RunConfig
from rankfold.lab.optimizers import WideAdamW

from .lab_runs import killed_at, run, same_weights, small, write_corpus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return write_corpus(tmp_path)


def bfloat16(corpus: Path, **options: Any) -> RunConfig:
    return small(
        corpus,
        model__weights="bfloat16",
        model__width=64,
        model__head_width=16,
        training__deterministic=True,
        training__keep_weights=True,
        **options,
    )


VARIANTS: list[dict[str, Any]] = [
    {"optimizer__name": "adamw"},
    {"optimizer__name": "frozen"},
    {"optimizer__name": "isometry-quotient", "optimizer__lr": 2.0**-4},
    {"optimizer__name": "isometry-quotient", "optimizer__lr": 1.0},
    {
        "optimizer__name": "fixed-quotient",
        "optimizer__normalize": "schatten-inf",
        "optimizer__momentum": 0.9,
    },
    {
        "optimizer__name": "fixed-embedded",
        "optimizer__masters": False,
        "optimizer__momentum": 0.5,
        "training__accumulate": 2,
        "training__clip": 1.0,
    },
    {
        "optimizer__name": "fixed-quotient",
        "optimizer__normalize": "whitened",
        "optimizer__vo_rate": 4.0,
        "optimizer__output_rate": 2.0,
        "optimizer__momentum": 0.8,
    },
    {
        "optimizer__name": "fixed-quotient",
        "optimizer__normalize": "whitened",
        "optimizer__tilt": 0.25,
        "optimizer__row_balance": 0.5,
        "optimizer__tilted_products": "vo",
        "optimizer__vo_rate": 4.0,
        "optimizer__momentum": 0.8,
    },
    {"optimizer__name": "muon", "optimizer__momentum": 0.9},
    {
        "optimizer__name": "muon",
        "optimizer__momentum": 0.9,
        "optimizer__vo_rate": 4.0,
        "optimizer__output_rate": 2.0,
        "optimizer__weight_decay": 0.0,
    },
    {"optimizer__name": "dion", "optimizer__momentum": 0.9, "optimizer__dion_rank": 0.5},
    {"optimizer__name": "whitened", "optimizer__momentum": 0.9, "optimizer__masters": False},
]


@pytest.mark.parametrize("options", VARIANTS)
def test_a_graph_is_the_same_steps(
    options: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bfloat16(corpus, training__graph=True, **options)
    replayed = run(config, tmp_path / "replayed", "cuda")
    monkeypatch.setattr(graphs, "_WARM_UP", 10**9)
    eager = run(config, tmp_path / "eager", "cuda")
    assert replayed.status == "finished"
    assert replayed.training.values == eager.training.values
    assert replayed.validation.values == eager.validation.values
    assert same_weights(tmp_path / "replayed", tmp_path / "eager")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("options", VARIANTS[2:])
def test_a_killed_run_goes_on_bit_for_bit(
    options: dict[str, Any], graph: bool, corpus: Path, tmp_path: Path
) -> None:
    config = bfloat16(corpus, training__graph=graph, **options)
    whole = run(config, tmp_path / "whole", "cuda")
    killed_at(config, tmp_path / "cut", 20, "cuda")
    resumed = run(config, tmp_path / "cut", "cuda")
    assert resumed.status == "finished"
    assert resumed.training.values == whole.training.values
    assert same_weights(tmp_path / "whole", tmp_path / "cut")


def test_a_graph_of_adamw_in_one_pass() -> None:
    """Replayed at rates, and with gradients, other than those it was recorded with."""
    device = torch.device("cuda")

    def steps(recorded: bool) -> tuple[list[Tensor], dict[str, Any]]:
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(257, 64), (33, 7), (5,)]
        draw = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
        weights = [torch.nn.Parameter(x.bfloat16()) for x in draw]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        ours = WideAdamW(weights, 1.0, 0.1, masters=True, capturable=True)
        assert ours.one_pass
        step = graphs.Captured(ours.step, device) if recorded else ours.step
        for k in range(10):
            ours.set_lr(0.01 * (k + 1))
            for weight in weights:
                assert weight.grad is not None
                weight.grad.normal_(generator=generator)
            step()
        return [weight.detach() for weight in weights], ours.state_dict()

    (eager, kept), (replayed, kept_too) = steps(False), steps(True)
    assert all(map(torch.equal, eager, replayed))
    assert all(map(torch.equal, kept["wide"], kept_too["wide"]))
    assert [float(state["step"]) for state in kept_too["inner"]["state"].values()] == [10.0] * 3


def test_a_graph_of_a_compiled_model(corpus: Path, tmp_path: Path) -> None:
    found = [
        run(
            small(corpus, training__compile=compiled, training__graph=compiled),
            tmp_path / str(compiled),
            "cuda",
        )
        for compiled in (False, True)
    ]
    assert found[1].training.values == pytest.approx(found[0].training.values, abs=1e-4)
