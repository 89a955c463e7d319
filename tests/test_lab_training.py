from __future__ import annotations

import gc
import math
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rankfold import RiemannianSGD
from rankfold.geometries import GEOMETRIES
from rankfold.lab import graphs, records
from rankfold.lab.config import TrainingConfig
from rankfold.lab.model import Decoder
from rankfold.lab.optimizers import Riemannian, WideAdamW, build
from rankfold.lab.sweep import run_sweep
from rankfold.lab.trainer import Trainer, rate_factor
from rankfold.lab.training import Progress, train

from .lab_runs import killed_at, run, same_weights, small, write_corpus

CPU = torch.device("cpu")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path)


# Schedules and graphs --------------------------------------------------------------------------


def test_learning_rates_rise_and_fall() -> None:
    flat = TrainingConfig(steps=100)
    assert [rate_factor(k, flat) for k in (0, 4, 9, 10, 99)] == [0.1, 0.5, 1, 1, 1]
    for kind in ("linear", "cosine"):
        config = TrainingConfig(steps=100, annealing=kind)
        factors = [rate_factor(k, config) for k in range(100)]
        assert factors[10] == 1
        assert factors[55] == pytest.approx(0.5)
        assert all(x > y for x, y in pairwise(factors[10:]))
        assert 0 < factors[-1] < 0.02
    assert rate_factor(0, TrainingConfig(warmup=0)) == 1


def test_nothing_is_collected_while_a_graph_is_recorded() -> None:
    """Of earlier runs, all; of what comes meanwhile, nothing."""
    freed: list[str] = []

    class Cycle:
        def __init__(self, name: str) -> None:
            self.itself = self
            weakref.finalize(self, freed.append, name)

    Cycle("before")
    graphs.free_earlier()
    assert freed == ["before"]
    with graphs.nothing_collected():
        Cycle("meanwhile")
        assert [[k] for k in range(10**5)]  # more than the collector waits for
        assert freed == ["before"]
    assert gc.isenabled()
    gc.collect()
    assert freed == ["before", "meanwhile"]


# Optimizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("masters", [True, False])
def test_wide_adamw_on_bfloat16(masters: bool) -> None:
    """With masters it is AdamW in float32, rounded; without, small steps are lost to rounding."""
    torch.manual_seed(0)
    start = torch.randn(20)
    weight = torch.nn.Parameter(start.bfloat16())
    wide = torch.nn.Parameter(weight.detach().float())
    ours = WideAdamW([weight], 1e-5, 0.01, masters)
    theirs = torch.optim.AdamW([wide], 1e-5, weight_decay=0.01)
    before = weight.detach().clone()
    for _ in range(300):
        gradient = torch.randn(20).bfloat16()
        gradient += 1
        weight.grad, wide.grad = gradient, gradient.float()
        ours.step()
        theirs.step()
    big = before.abs() > 0.1  # whose spacing in bfloat16 a step of 1e-5 does not cross
    if masters:
        assert torch.equal(weight.detach(), wide.detach().bfloat16())
        assert (weight != before).any()
    else:
        assert torch.equal(weight[big], before[big])
    assert ours.inner.state[ours.wide[0]]["exp_avg"].dtype == torch.float32


def test_momentum_is_adamws_first_beta_on_attention(corpus: Path) -> None:
    """0, which earlier runs have in their record, is torch's own 0.9."""
    for momentum, beta in ((0.0, 0.9), (0.95, 0.95)):
        config = small(corpus, optimizer__momentum=momentum)
        attention, others = build(Decoder(config.model, 257), config.optimizer)
        assert isinstance(attention, WideAdamW)
        assert attention.inner.defaults["betas"] == (beta, 0.999)
        assert others.inner.defaults["betas"] == (0.9, 0.999)


def test_frozen_attention_stays(corpus: Path) -> None:
    config = small(corpus, optimizer__name="frozen")
    model = Decoder(config.model, 257)
    attention, others = build(model, config.optimizer)
    assert attention is None
    before = [p.clone() for p in model.attention_parameters()]
    model(torch.randint(257, (2, 8))).backward()
    others.step()
    assert all(map(torch.equal, before, model.attention_parameters()))


def test_masters_can_be_done_without(corpus: Path) -> None:
    for masters in (True, False):
        config = small(
            corpus,
            optimizer__name="isometry-quotient",
            optimizer__masters=masters,
            model__weights="bfloat16",
        )
        model = Decoder(config.model, 257)
        attention, _ = build(model, config.optimizer)
        assert isinstance(attention, Riemannian)
        for _ in range(3):
            model.zero_grad()
            model(torch.arange(16).view(2, 8)).backward()
            attention.step()
        rounded = all(
            torch.equal(state["master"], param.float())
            for param, state in attention.inner.state.items()
        )
        assert rounded != masters


def test_options_of_geometries_reach_their_optimizer(corpus: Path) -> None:
    config = small(
        corpus,
        optimizer__name="isometry-quotient",
        optimizer__momentum=0.5,
        optimizer__bias_correction=True,
        optimizer__second_moment=0.75,
        optimizer__scale_lr=0.5,
        optimizer__lr=0.25,
    )
    attention, _ = build(Decoder(config.model, 257), config.optimizer)
    assert isinstance(attention, Riemannian)
    attention.set_lr(0.125)
    (group,) = attention.inner.param_groups
    assert (group["lr"], group["scale_lr"]) == (0.125, 0.25)
    assert (group["bias_correction"], group["second_moment"]) == (True, 0.75)
    config = small(
        corpus,
        optimizer__name="fixed-quotient",
        optimizer__momentum=0.5,
        optimizer__momentum_form="heavy-ball",
        optimizer__growth=0.5,
        optimizer__product_decay=0.5,
        optimizer__decay_to=2.0,
    )
    attention, _ = build(Decoder(config.model, 257), config.optimizer)
    assert isinstance(attention, Riemannian)
    (group,) = attention.inner.param_groups
    assert (group["weight_decay"], group["decay_to"], group["scale_lr"]) == (0.5, 2.0, None)
    assert (group["momentum_form"], group["growth"]) == ("heavy-ball", 0.5)
    config = small(
        corpus,
        optimizer__name="fixed-quotient",
        optimizer__normalize="whitened",
        optimizer__tilt=0.25,
        optimizer__row_balance=0.5,
    )
    attention, _ = build(Decoder(config.model, 257), config.optimizer)
    assert isinstance(attention, Riemannian)
    (group,) = attention.inner.param_groups
    assert (group["tilt"], group["row_balance"]) == (0.25, 0.5)


# Runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", *GEOMETRIES])
def test_every_optimizer_learns(name: str, corpus: Path, tmp_path: Path) -> None:
    lr = 2.0**-6 if name == "adamw" else 2.0**-3
    config = small(corpus, optimizer__name=name, optimizer__lr=lr)
    found = run(config, tmp_path / "run")
    assert found.status == "finished"
    assert found.training.steps == list(range(1, 31))
    assert found.validation.steps == [10, 20, 30]
    assert found.training.last_mean(5) < found.training.values[0] - 1
    assert len(found.step_seconds.values) == len(found.optimizer_seconds.values) == 30
    assert all(
        0 < part < whole
        for part, whole in zip(
            found.optimizer_seconds.values, found.step_seconds.values, strict=True
        )
    )
    assert not (tmp_path / "run" / records.CHECKPOINT).exists()


def losses(found: records.Run) -> list[list[float]]:
    return [found.training.values, found.validation.values]


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer__name": "adamw", "data__shuffle": "samples"},
        {"optimizer__name": "fixed-quotient", "optimizer__momentum": 0.5},
        {
            "optimizer__name": "isometry-embedded",
            "optimizer__momentum": 0.9,
            "model__weights": "bfloat16",
            "training__accumulate": 2,
            "training__clip": 1.0,
            "training__annealing": "cosine",
            "training__diagnostics_every": 5,
        },
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    options: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    config = small(corpus, training__keep_weights=True, **options)
    whole = run(config, tmp_path / "whole")
    cut = tmp_path / "cut"
    killed_at(config, cut, 20)
    resumed = run(config, cut)
    assert resumed.status == "finished"
    assert losses(resumed) == losses(whole)
    assert resumed.diagnostics == whole.diagnostics
    assert same_weights(tmp_path / "whole", cut)


def test_a_finished_run_is_only_read(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, training__steps=10)
    first = run(config, tmp_path / "run")
    shown: list[Progress] = []
    again = train(config, tmp_path / "run", device=CPU, show=shown.append)
    assert shown == []
    assert losses(again) == losses(first)


def test_a_run_is_made_by_one_at_a_time(corpus: Path, tmp_path: Path) -> None:
    """Whoever comes second is told so, and writes nothing; a sweep goes on with its other runs."""
    config = small(corpus, training__steps=3)
    folder = tmp_path / config.key
    folder.mkdir()
    with records.held(folder):
        with pytest.raises(ValueError, match="is being made by another process"):
            run(config, folder)
        other = config.with_options({"training.seed": 1})
        outcomes = run_sweep([config, other], tmp_path, device="cpu")
    assert [outcome.status for outcome in outcomes] == ["failed", "finished"]
    assert not list(folder.iterdir())
    assert run(config, folder).status == "finished"


def test_weights_that_were_not_kept_cannot_be_had_later(corpus: Path, tmp_path: Path) -> None:
    options = {"training__steps": 10}
    run(small(corpus, **options), tmp_path / "run")
    with pytest.raises(ValueError, match="without its weights being kept"):
        run(small(corpus, training__keep_weights=True, **options), tmp_path / "run")
    assert records.status_of(tmp_path / "run") == "finished"


def test_seeds_differ_and_repeat(corpus: Path, tmp_path: Path) -> None:
    found = [
        losses(run(small(corpus, training__seed=seed, training__steps=10), tmp_path / str(k)))
        for k, seed in enumerate((0, 0, 1))
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_divergence_ends_a_run_and_keeps_its_record(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, optimizer__other_lr=1e30)
    found = run(config, tmp_path / "run")
    assert found.status == "diverged"
    assert "try a smaller" in found.message
    assert found.training.steps
    assert not math.isfinite(found.training.values[-1])
    assert run(config, tmp_path / "run").status == "diverged"


@pytest.mark.parametrize("checkpoint_every", [25, 500])
def test_checkpoints_do_not_hide_a_divergence(
    checkpoint_every: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a single step, the one before a checkpoint."""
    advance = Trainer.advance

    def advance_badly(self: Trainer, clock: Any) -> torch.Tensor:
        loss = advance(self, clock)
        return loss * math.inf if self.step == 25 else loss

    monkeypatch.setattr(Trainer, "advance", advance_badly)
    config = small(corpus, training__checkpoint_every=checkpoint_every)
    assert run(config, tmp_path / "run").status == "diverged"
    assert not (tmp_path / "run" / records.CHECKPOINT).exists()


def test_steps_that_were_skipped_are_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(corpus, optimizer__name="fixed-quotient", training__steps=3)
    assert run(config, tmp_path / "sound").message == ""
    counts = {"layer.qk[0]": {"skipped": 2}, "layer.vo[0]": {"skipped": 1}}
    monkeypatch.setattr(RiemannianSGD, "counts", lambda _: counts)
    spoilt = run(config, tmp_path / "spoilt")
    assert (spoilt.status, spoilt.message) == ("finished", "steps of members: 3 skipped")


def test_a_failure_is_written_down(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, data__source=str(tmp_path / "nowhere"))
    with pytest.raises((ValueError, FileNotFoundError)):
        run(config, tmp_path / "run")
    assert records.read_run(tmp_path / "run").status == "failed"


def test_accumulation_is_a_larger_batch(corpus: Path, tmp_path: Path) -> None:
    """The first loss of two halves is their mean; steps see as many tokens as they say."""
    config = small(corpus, training__accumulate=2, training__steps=10)
    found = run(config, tmp_path / "run")
    assert found.tokens_a_step == 2 * 32 * 2
    single = run(small(corpus, training__steps=10), tmp_path / "single")
    assert found.training.values[0] != single.training.values[0]
    assert found.training.values[0] == pytest.approx(single.training.values[0], rel=0.05)


def test_graphs_need_a_gpu(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        run(small(corpus, training__graph=True), tmp_path / "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of torch
def test_compiled_model_is_the_model(corpus: Path, tmp_path: Path) -> None:
    plain = run(small(corpus, training__steps=10), tmp_path / "plain")
    compiled = run(small(corpus, training__steps=10, training__compile=True), tmp_path / "compiled")
    assert compiled.training.values == pytest.approx(plain.training.values, abs=1e-4)


def test_tensorboard_gets_the_numbers(corpus: Path, tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.tags: dict[str, list[int]] = {}

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            assert math.isfinite(scalar_value)
            self.tags.setdefault(tag, []).append(global_step)

    writer = Writer()
    train(small(corpus, training__steps=20), tmp_path / "run", device=CPU, scalars=writer)
    assert writer.tags["loss/training"] == list(range(1, 21))
    assert writer.tags["loss/validation"] == [10, 20]
    assert {"time/tokens_per_second", "time/optimizer_share"} <= set(writer.tags)


def test_what_is_no_run_is_left_out(corpus: Path, tmp_path: Path) -> None:
    run(small(corpus, training__steps=10), tmp_path / "run")
    others = {"model": '{"model_type": "llama"}', "broken": '{"key"', "list": "[]"}
    for name, text in others.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / records.CONFIG).write_text(text, encoding="utf-8")
    assert [found.folder.name for found in records.read_runs(tmp_path)] == ["run"]
    # An empty file is what a power cut can leave.
    for text in ("", '{"message": "of no status"}'):
        (tmp_path / "run" / records.STATUS).write_text(text, encoding="utf-8")
        assert records.read_run(tmp_path / "run").status == "running"


def test_a_line_cut_off_by_a_kill_is_left_out(corpus: Path, tmp_path: Path) -> None:
    found = run(small(corpus, training__steps=10), tmp_path / "run")
    metrics = tmp_path / "run" / records.METRICS
    metrics.write_text(metrics.read_text(encoding="utf-8") + '{"kind": "tra', encoding="utf-8")
    assert losses(records.read_run(tmp_path / "run")) == losses(found)
