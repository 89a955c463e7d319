"""Train a small attention model with AdamW and with each of rankfold's geometries, and compare.

The model is a two-layer causal transformer that reads bytes of the Python standard library, which
is on every machine that runs this. Six copies start from the same weights and see the same
batches. They differ in one thing, the optimizer of the query, key, value and output projections:
AdamW treats the four weights apart, rankfold steps on the products query·key and output·value of
each head. AdamW trains everything else in all six.

    pip install "rankfold[demo]"
    python examples/demo.py                       # under two minutes on two CPU cores
    python examples/demo.py --threads 1           # faster when the cores have other work to do

It prints a table and draws the loss curves to demo.png. rankfold is adopted in three lines, marked
so in `fresh_model` and `optimizers_for`.

The learning rates in `RATES` were picked on this very task, for each optimizer by itself, AdamW
included, by a sweep over powers of two on two other seeds. The momentum and the rate of all other
weights are shared by all six and were picked coarsely. This is a demonstration, not a benchmark.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import rankfold

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 2, 4, 64, 64, 32
MOMENTUM = 0.8  # and AdamW's first beta
OTHER_RATE = 2**-6  # AdamW's, for all that is not an attention projection
# Learning rate of the attention projections. For a geometry it is the length of a head's step.
RATES = {
    "AdamW": 2**-7,
    "fixed-embedded": 2**-3,
    "fixed-quotient": 2**-3,
    "isometry-embedded": 2**-3,
    "isometry-quotient": 2**-3,
    "isometry-canonical": 2**-3,
}
CONCLUSION = (
    "This shows that every geometry trains and what its step costs here; it does not show which is "
    "best, for one seed of a toy model cannot tell differences of a few hundredths apart."
)
COLOURS = ("black", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73")


class Attention(nn.Module):
    """Nothing stands between query and key: the loss depends on the products alone."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(norm(x))
        out: Tensor = x + self.down(F.relu(self.up(norm(x))).square())
        return out


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = norm(self.tokens(ids) + self.positions.weight)
        out: Tensor = self.head(norm(self.blocks(x)))
        return out


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,))


def loss_on(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of every next byte, in nats, over windows (batch, CONTEXT + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def fresh_model(seed: int) -> ByteModel:
    """A model whose attention factors are orthonormal, as the isometry geometries need."""
    torch.manual_seed(seed)
    model = ByteModel()
    grids = rankfold.attention_grids(model)  # rankfold 1: which weights form products
    with warnings.catch_warnings():
        # The warning is for trained models, whose function this would change.
        warnings.filterwarnings("ignore", message="orthonormalize_ set all singular values")
        rankfold.orthonormalize_(grids)  # rankfold 2: a start on the isometry manifold
    return model


def optimizers_for(model: nn.Module, name: str, rate: float) -> list[Optimizer]:
    """AdamW on everything, or the geometry ``name`` on attention and AdamW on the rest."""
    grids = rankfold.attention_grids(model)
    attention = {id(p): p for grid in grids for p in grid.params()}
    others = [p for p in model.parameters() if id(p) not in attention]
    adamw = AdamW(others, lr=OTHER_RATE, betas=(MOMENTUM, 0.95))
    if name == "AdamW":
        adamw.add_param_group({"params": list(attention.values()), "lr": rate})
        return [adamw]
    # rankfold 3: an optimizer like any other, next to the one for the other weights
    return [rankfold.RiemannianSGD(grids, lr=rate, geometry=name, momentum=MOMENTUM), adamw]


def standard_library() -> tuple[Tensor, Tensor]:
    """Bytes of the library's top-level modules; every tenth file is held out for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    # Names that begin with an underscore include files generated for one machine.
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    if len(files) < 20:
        raise SystemExit(f"the standard library in {folder} comes without its source")
    texts = (
        b"".join(path.read_bytes() for k, path in enumerate(files) if k % 10 != 9),
        b"".join(path.read_bytes() for path in files[9::10]),
    )
    kept, held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return kept, held_out


def windows_from(text: Tensor, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random windows of CONTEXT + 1 bytes, (*shape, CONTEXT + 1), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, shape, generator=generator)
    return text[starts[..., None] + torch.arange(CONTEXT + 1)].long()


@dataclass
class Run:
    name: str
    rate: float
    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train(run: Run, model: nn.Module, batches: Tensor, held_out: Tensor) -> Iterator[float]:
    """Train ``model``, fill in ``run``, and yield each step's loss."""
    steps = len(batches)
    began = time.perf_counter()
    optimizers = optimizers_for(model, run.name, run.rate)
    schedules = [  # a short warm-up, then a straight line to zero
        LambdaLR(o, lambda k: min(1.0, (k + 1) / 20) * (1 - k / steps)) for o in optimizers
    ]
    for step, batch in enumerate(batches, start=1):
        loss = loss_on(model, batch)
        loss.backward()
        stepping = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        run.optimizer_ms.append(1000 * (time.perf_counter() - stepping))
        for schedule in schedules:
            schedule.step()
        model.zero_grad()
        run.train.append(loss.item())
        if step % max(1, steps // 10) == 0 or step == steps:
            with torch.no_grad():
                run.validation.append((step, loss_on(model, held_out).item()))
        run.seconds = time.perf_counter() - began
        yield run.train[-1]


def train_all(console: Console, steps: int, seed: int) -> list[Run]:
    train_text, held_out_text = standard_library()
    batches = windows_from(train_text, (steps, BATCH), seed)
    held_out = windows_from(held_out_text, (128,), seed)
    initial = fresh_model(seed)
    runs = [Run(name, rate) for name, rate in RATES.items()]
    columns = ("{task.description}", BarColumn(bar_width=None), "ETA", TimeRemainingColumn())
    silent = not console.is_terminal  # a log gets a line a run instead of a moving bar
    with Progress(*columns, console=console, expand=True, disable=silent) as progress:
        task = progress.add_task("", total=steps * len(runs))
        for run in runs:
            model = copy.deepcopy(initial)
            for step, loss in enumerate(train(run, model, batches, held_out), start=1):
                text = f"{run.name:<18}  step {step:>3}/{steps}  loss {loss:.3f}"
                progress.update(task, advance=1, description=text)
            if silent:
                console.print(f"{run.name}: {steps} steps in {run.seconds:.1f} s", highlight=False)
    return runs


def comparison(runs: list[Run]) -> Table:
    table = Table(title="Bytes of the standard library, loss in nats a byte")
    table.add_column("QKVO optimizer", no_wrap=True)
    for heading in ("QKVO rate", "train loss", "val. loss", "optimizer ms/step", "seconds"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.rate:.3g}",
            f"{smooth(run.train)[1][-1]:.3f}",
            f"{run.validation[-1][1]:.3f}",
            f"{statistics.median(run.optimizer_ms):.2f}",
            f"{run.seconds:.1f}",
        )
    return table


def smooth(losses: list[float]) -> tuple[Tensor, Tensor]:
    """Steps, and a centred running mean of the losses over a twentieth of the run."""
    width = max(1, len(losses) // 20)
    means = torch.tensor(losses).unfold(0, width, 1).mean(-1)
    return torch.arange(len(means)) + (width + 1) / 2, means


def draw(runs: list[Run], path: Path) -> None:
    """Two panels: the losses, and how far they are from AdamW's on the same batches."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    losses, relative = figure.subplots(1, 2)
    for run, colour in zip(runs, COLOURS, strict=True):
        steps, means = smooth(run.train)
        losses.plot(steps, means, color=colour, label=run.name)
        losses.plot(*zip(*run.validation, strict=True), "o", color=colour, fillstyle="none")
        relative.plot(steps, means - smooth(runs[0].train)[1], color=colour)
    losses.plot([], [], color="gray", label="training, running mean")
    losses.plot([], [], "o", color="gray", fillstyle="none", label="held-out files")
    losses.set(title="Loss", ylabel="cross-entropy, nats a byte")
    losses.set_ylim(top=1.1 * max(run.validation[0][1] for run in runs))  # leave out the first fall
    losses.legend(frameon=False)
    relative.set(title="Training loss minus AdamW's", ylabel="difference, nats a byte")
    for panel in (losses, relative):
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A {LAYERS}-layer byte model of the Python standard library, one seed")
    figure.savefig(path, dpi=150, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="PNG to write")
    options = parser.parse_args()
    if options.steps < 1 or options.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if not options.output.parent.is_dir():
        parser.error(f"--output: {options.output.parent} is not a folder")
    torch.set_num_threads(options.threads)
    console = Console()
    runs = train_all(console, options.steps, options.seed)
    console.print(comparison(runs))
    console.print(CONCLUSION)
    draw(runs, options.output)
    console.print(f"Loss curves: {options.output}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
