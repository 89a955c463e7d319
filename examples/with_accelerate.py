"""Accelerate: the optimizer is prepared as any other, here with bfloat16 and accumulation.

Trains a small Llama with random weights on the bytes of this file; a few seconds on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import rankfold


def main() -> None:
    """Train for four passes over the text."""
    set_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = rankfold.build_optimizer(model, lr=0.004, base_lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.5)
    text = list(Path(__file__).read_bytes())
    pieces = [torch.tensor(text[k : k + 32]) for k in range(0, len(text) - 32, 8)]
    loader: DataLoader[Tensor] = DataLoader(pieces, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(4):
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
