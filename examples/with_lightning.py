"""Lightning: `configure_optimizers` returns the optimizer, alone or with a scheduler.

Trains a small Llama with random weights on the bytes of this file; a few seconds on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import rankfold


class Language(lightning.LightningModule):
    """A language model that reports its loss after every pass."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        if self.trainer.is_last_batch:
            print(f"epoch {self.current_epoch} loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> Any:
        """One optimizer for all parameters, and a scheduler of all its groups."""
        optimizer = rankfold.build_optimizer(self, lr=0.004, base_lr=3e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main() -> None:
    """Train for four passes over the text."""
    lightning.seed_everything(0, verbose=False)
    text = list(Path(__file__).read_bytes())
    pieces = [torch.tensor(text[k : k + 32]) for k in range(0, len(text) - 32, 8)]
    loader: DataLoader[Tensor] = DataLoader(pieces, batch_size=16, shuffle=True)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        max_epochs=4, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Language(), loader)


if __name__ == "__main__":
    main()
