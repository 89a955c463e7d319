"""Fine-tuning by LoRA on real text: AdamW, PEFT's Riemannian AdamW, and rankfold, at equal steps.

A small Llama is trained on Python's documentation, byte by byte, then adapted to its own source
code. Every method gets the same adapters, batches and number of steps, and a learning rate that
falls to zero from a height found by the same number of tries, on a seed not compared.

    python examples/lora_finetuning.py --output lora

Needs transformers, peft and matplotlib; takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import csv
import inspect
import math
import pydoc_data.topics
import statistics
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_riemannian_optimizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rankfold

SOURCES = ("argparse", "inspect", "typing", "tarfile", "decimal", "pickle", "subprocess", "ast")
LENGTH, BATCH, RANK = 128, 16, 8


def text_of(modules: tuple[str, ...]) -> Tensor:
    """The source code of modules, as bytes."""
    sources = (inspect.getsource(import_module(name)) for name in modules)
    return torch.tensor(list("\n".join(sources).encode()))


def batch_of(text: Tensor, generator: torch.Generator) -> Tensor:
    """(BATCH, LENGTH) bytes from anywhere in a text."""
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([text[k : k + LENGTH] for k in starts])


def pretrained(text: Tensor, steps: int) -> Any:
    """A small language model that knows prose."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = batch_of(text, generator)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Method(NamedTuple):
    """How to make an optimizer of a model and a learning rate, and the rates to try."""

    build: Callable[[Any, float], torch.optim.Optimizer]
    rates: tuple[float, ...]
    full_rank: bool = False


def adamw(model: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW on both factors."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def of_peft(model: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW on preconditioned gradients."""
    return create_riemannian_optimizer(model, torch.optim.AdamW, lr=lr)


def ours(model: Any, lr: float) -> torch.optim.Optimizer:
    """What `rankfold.recommended` takes."""
    return rankfold.recommended(rankfold.lora_grids(model), lr=lr)


def damped(model: Any, lr: float) -> torch.optim.Optimizer:
    """From B = 0."""
    return rankfold.RiemannianSGD(
        rankfold.lora_grids(model), lr, geometry="fixed-quotient", momentum=0.9, damping=1e-2
    )


METHODS = {
    "AdamW": Method(adamw, tuple(2.0**-k for k in (8, 7, 6, 5, 4))),
    "PEFT Riemannian AdamW": Method(of_peft, tuple(2.0**-k for k in (8, 7, 6, 5, 4))),
    "rankfold, full-rank start": Method(ours, tuple(2.0**-k for k in (5, 4, 3, 2, 1)), True),
    "rankfold, damped start": Method(damped, tuple(2.0**-k for k in (4, 3, 2, 1, 0))),
}


def fine_tuned(
    base: Any, method: Method, lr: float, seed: int, steps: int, texts: tuple[Tensor, Tensor]
) -> list[float]:
    """Losses on held-out text, at the start and after every tenth of the steps."""
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets)
    model: Any = get_peft_model(copy.deepcopy(base), config)
    if method.full_rank:
        rankfold.full_rank_start_(model, size=0.1, seed=seed)
    optimizer = method.build(model, lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    generator = torch.Generator().manual_seed(seed)
    losses = [held_out(model, texts[1])]
    for step in range(1, steps + 1):
        batch = batch_of(texts[0], generator)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            losses.append(held_out(model, texts[1]))
    return losses


@torch.no_grad()
def held_out(model: Any, text: Tensor) -> float:
    """The mean loss of the same 64 samples."""
    generator = torch.Generator().manual_seed(12)
    batches = [batch_of(text, generator) for _ in range(4)]
    return statistics.mean(float(model(input_ids=b, labels=b).loss) for b in batches)


def main() -> None:
    """Pretrain, tune, compare, and write a table and a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pretraining", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=int, default=5, help="learning rates tried, at most 5")
    parser.add_argument("--output", type=Path, default=Path("lora"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    prose = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    texts = text_of(SOURCES[:-2]), text_of(SOURCES[-2:])
    base = pretrained(prose, options.pretraining)
    curves, rows = {}, []
    for name, method in METHODS.items():
        tried = {
            lr: fine_tuned(base, method, lr, 100, options.steps, texts)[-1]
            for lr in method.rates[: options.rates]
        }
        lr = min(tried, key=lambda each: tried[each] if math.isfinite(tried[each]) else math.inf)
        runs = [
            fine_tuned(base, method, lr, seed, options.steps, texts)
            for seed in range(options.seeds)
        ]
        curves[name] = [statistics.mean(at) for at in zip(*runs, strict=True)]
        ends = [run[-1] for run in runs]
        spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
        rows.append([name, lr, curves[name][0], statistics.mean(ends), spread])
        print(f"{name:28} lr {lr:<8g} {rows[-1][2]:.4f} -> {rows[-1][3]:.4f} ± {spread:.4f}")
    with (options.output / "lora.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "lr", "loss_before", "loss_after", "std"])
        writer.writerows(rows)
    draw(curves, options.steps, options.output / "lora.png")


def draw(curves: dict[str, list[float]], steps: int, path: Path) -> None:
    """Loss against steps."""
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, losses in curves.items():
        axes.plot([k * max(1, steps // 10) for k in range(len(losses))], losses, label=name)
    axes.set(xlabel="step of fine-tuning", ylabel="loss on held-out source code")
    axes.legend(frameon=False)
    axes.grid(linestyle=":")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
