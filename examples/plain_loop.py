"""A plain training loop: one optimizer, one scheduler, clipping, a checkpoint.

Trains a small Llama with random weights on the bytes of this file; a few seconds on a CPU.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rankfold

STEPS = 40


def main() -> None:
    """Train, save halfway, and go on from what was saved."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = rankfold.build_optimizer(model, lr=0.004, base="muon", base_lr=3e-3)
    print(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    text = torch.tensor(list(Path(__file__).read_bytes()))

    saved = io.BytesIO()  # a file, in earnest
    for step in range(STEPS):
        starts = torch.randint(len(text) - 32, (8,))
        tokens = torch.stack([text[k : k + 32] for k in starts.tolist()])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step} loss {loss.item():.3f}")
        if step == STEPS // 2:
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(checkpoint, saved)
            saved.seek(0)
            loaded = torch.load(saved, weights_only=True)
            model.load_state_dict(loaded["model"])
            scheduler.load_state_dict(loaded["scheduler"])
            optimizer.load_state_dict(loaded["optimizer"])


if __name__ == "__main__":
    main()
