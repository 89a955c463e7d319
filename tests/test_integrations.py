"""Trainer, Accelerate and Lightning take the steps of a plain loop, and resume; examples run."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import rankfold

from .toys import clones, same_bits
from .whole_models import Language, batch, llama, loss_of

_FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = [_FOLDER / "plain_loop.py", *sorted(_FOLDER.glob("with_*.py"))]
STEPS = 6

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings for the life of a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def build(model: nn.Module, base: str = "adamw") -> rankfold.CombinedOptimizer:
    return rankfold.build_optimizer(model, 0.05, base=base, base_lr=0.01)


def plain(base: str, in_order_of_groups: bool) -> Language:
    """The model after a loop without any framework, its learning rates halved every second step.

    In which order parameters are clipped is up to the frameworks, and shows in the last bits.
    """
    model = Language()
    optimizer = build(model, base)
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params if in_order_of_groups else model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return model


def moved(before: list[Tensor], model: nn.Module) -> bool:
    return not any(torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))


# Trainer ----------------------------------------------------------------------------------------


class Rates(TrainerCallback):
    """The learning rates of all groups after every step."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def trainer_for(folder: Path, base: str, **options: Any) -> tuple[Any, Rates]:
    model = llama()
    data = [{"input_ids": batch(k)[0], "labels": batch(k)[0]} for k in range(16)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=2,
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    rates = Rates()
    optimizers = (build(model, base), None)
    return Trainer(
        model, arguments, train_dataset=data, optimizers=optimizers, callbacks=[rates]
    ), rates


@pytest.mark.parametrize(("base", "bf16"), [("adamw", False), ("muon", False), ("adamw", True)])
def test_trainer_resumes_where_it_was(tmp_path: Path, base: str, bf16: bool) -> None:
    """A run that is taken up halfway, by a fresh model and optimizer, ends bit for bit the same."""
    first, rates = trainer_for(tmp_path, base, bf16=bf16)
    before = clones(first.model)
    first.train()
    assert moved(before, first.model)
    second, later = trainer_for(tmp_path, base, bf16=bf16)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert second.state.global_step == STEPS
    assert same_bits(first.model.parameters(), second.model.parameters())
    assert later.seen == rates.seen[STEPS // 2 :]
    start = [0.05] + [0.01] * (len(rates.seen[0]) - 1)
    for step, lrs in enumerate(rates.seen, 1):
        assert lrs == pytest.approx([lr * (1 - step / STEPS) for lr in start])


def test_trainer_takes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    """On what the Trainer hands to the model, which is where its batches can be seen."""
    trainer, _ = trainer_for(tmp_path, "adamw")
    seen: list[dict[str, Any]] = []
    trainer.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(dict(given)), with_kwargs=True
    )
    trainer.train()
    assert len(seen) == STEPS
    model = llama()
    optimizer = build(model)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for given in seen:
        model(**given).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert same_bits(trainer.model.parameters(), model.parameters())


# Accelerate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["adamw", "muon"])
def test_accelerate_takes_the_steps_of_a_plain_loop(base: str, tmp_path: Path) -> None:
    """Through a checkpoint of its own halfway, loaded into fresh objects."""
    for begin, end in ((0, STEPS // 2), (STEPS // 2, STEPS)):
        accelerator = Accelerator(cpu=True)
        model = Language()
        optimizer = build(model, base)
        scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        model, prepared, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if begin:
            accelerator.load_state(str(tmp_path))
        for step in range(begin, end):
            prepared.zero_grad()
            accelerator.backward(loss_of(model, step))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            prepared.step()
            scheduler.step()
        accelerator.save_state(str(tmp_path))
    expected = plain(base, in_order_of_groups=False)
    assert same_bits(model.parameters(), expected.parameters())
    assert isinstance(prepared, torch.optim.Optimizer)
    assert [group["lr"] for group in optimizer.param_groups][:2] == [0.05 / 8, 0.01 / 8]


def test_accelerate_accumulates_in_bfloat16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(language := Language(), build(language))
    before = clones(model)
    for step, changes in enumerate((False, True, False, True)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
        assert moved(before, model) is changes
        before = clones(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# Lightning --------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    """`Language` with a loss of its own for every step."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.language = Language()
        self.base = base

    def training_step(self, *_: Any) -> Tensor:
        return loss_of(self.language, self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = build(self, self.base)
        scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(module: Module, folder: Path, steps: int, **options: Any) -> Any:
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{key: options[key] for key in options if key != "ckpt_path"},
    )
    loader: Any = DataLoader([0] * STEPS)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=options.get("ckpt_path"))
    return trainer


@pytest.mark.parametrize("base", ["adamw", "muon"])
def test_lightning_takes_the_steps_of_a_plain_loop(base: str, tmp_path: Path) -> None:
    module = Module(base)
    trainer = fit(module, tmp_path, STEPS, gradient_clip_val=0.5)
    expected = plain(base, in_order_of_groups=True)
    assert same_bits(module.parameters(), expected.parameters())
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, rankfold.CombinedOptimizer)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_resumes_where_it_was(precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": precision}
    whole, first, second = (Module("adamw") for _ in range(3))
    fit(whole, tmp_path, 2 * STEPS, **options)
    fit(first, tmp_path, STEPS, **options).save_checkpoint(tmp_path / "half.ckpt")
    before = clones(first)
    fit(second, tmp_path, 2 * STEPS, ckpt_path=tmp_path / "half.ckpt", **options)
    assert moved(before, second)
    assert same_bits(whole.parameters(), second.parameters())


# Examples ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_learns(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    losses = [
        float(x) for x in re.findall(r"^\w+ \d+ loss ([\d.]+)$", capsys.readouterr().out, re.M)
    ]
    assert len(losses) > 3
    assert losses[-1] < 0.8 * losses[0]
    assert os.listdir(tmp_path) == []  # nothing is left behind


def test_examples_of_every_integration_are_there() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "plain_loop",
        "with_accelerate",
        "with_lightning",
        "with_trainer",
    }
