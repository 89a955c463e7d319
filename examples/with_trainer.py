"""The Trainer of transformers: the optimizer is handed to it, all else stays as it was.

Trains a small Llama with random weights on the bytes of this file; a few seconds on a CPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import rankfold


def main() -> None:
    """Train for 30 steps, then resume from the checkpoint and train for 10 more."""
    text = list(Path(__file__).read_bytes())
    pieces = [torch.tensor(text[k : k + 32]) for k in range(0, len(text) - 32, 8)]
    dataset = [{"input_ids": piece, "labels": piece} for piece in pieces]
    with tempfile.TemporaryDirectory() as folder:
        for steps, resume in ((30, False), (40, True)):
            set_seed(0)
            config = LlamaConfig(
                vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            )  # fmt: skip
            model = LlamaForCausalLM(config)
            arguments = TrainingArguments(
                folder, max_steps=steps, per_device_train_batch_size=8, lr_scheduler_type="cosine",
                warmup_steps=2, logging_steps=10, save_steps=30, report_to="none",
                disable_tqdm=True, dataloader_pin_memory=False,
            )  # fmt: skip
            optimizer = rankfold.build_optimizer(model, lr=0.004, base_lr=3e-3)
            trainer = Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None))
            trainer.train(resume_from_checkpoint=resume)
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']} loss {entry['loss']}")


if __name__ == "__main__":
    main()
