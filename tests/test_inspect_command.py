"""rankfold inspect: configurations, functions, random tokens, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rankfold.cli import app

from .families import FAMILIES, GROUPED, transformer


def command(*words: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, and no weights."""
    model = transformer("LlamaForCausalLM", GROUPED)()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_the_command_reads_a_configuration(folder: Path) -> None:
    shown = command(folder)
    assert shown.exit_code == 0, shown.output
    assert "LlamaForCausalLM: 2 grids found, 2 left out" in shown.stdout
    assert command(folder / "config.json").stdout == shown.stdout
    assert "inconsistency" not in shown.stdout


def test_a_configuration_of_something_else_is_said_to_be_one(tmp_path: Path) -> None:
    assert "no run in" in command(tmp_path).stderr
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    refused = command(tmp_path)
    assert refused.exit_code == 2
    assert "config.json' has no model_type" in refused.stderr


def test_the_command_measures_on_random_tokens(folder: Path) -> None:
    told = json.loads(command(folder, "--json", "--batch", 3).stdout)
    assert [each["name"] for each in told["found"]] == [
        f"model.layers.{k}.self_attn.vo" for k in (0, 1)
    ]
    assert all(each["inconsistency"] < 1e-4 for each in told["found"])
    assert all(each["inconsistency"] > 1e-2 for each in told["skipped"])
    assert all("rotary" in each["reason"] for each in told["skipped"])
    assert told["found"][0]["grid"] == {
        "members": 2,
        "lefts": 2,
        "rights": 1,
        "left_height": 16,
        "right_height": 16,
        "rank": 4,
    }
    assert told["covered"] < told["trainable"] == told["parameters"]


@pytest.mark.parametrize("family", ["t5", "bert", "gpt2"])
def test_other_shapes_of_models(family: str, tmp_path: Path) -> None:
    model: Any = FAMILIES[family].build()
    model.config.save_pretrained(tmp_path)
    told = json.loads(command(tmp_path, "--json", "--batch", 2).stdout)
    assert told["found"]
    assert all(each["inconsistency"] < 1e-4 for each in told["found"])


def test_a_model_far_too_large_for_this_machine(tmp_path: Path) -> None:
    config: Any = transformer("LlamaForCausalLM", GROUPED)().config
    config.architectures = ["LlamaForCausalLM"]
    config.hidden_size, config.num_hidden_layers, config.vocab_size = 16384, 4, 1_000_000
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 128, 8, 128
    config.save_pretrained(tmp_path)
    told = json.loads(command(tmp_path, "--json").stdout)
    assert told["parameters"] > 3e10
    assert told["found"][0]["grid"]["rank"] == 128


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        "import torch",
        "def build():",
        "    return torch.nn.MultiheadAttention(8, 2)",
        "n = 3",
    ]
    (tmp_path / "own_models.py").write_text("\n".join([*lines, "def none():", "    pass"]))
    shown = command("own_models:build")
    assert shown.exit_code == 0, shown.output
    assert "MultiheadAttention: 2 grids found" in shown.stdout
    for words, message in (
        (["own_models:n"], "own_models has no function 'n'"),
        (["own_models:none"], "returned a NoneType, not a module"),
        (["own_models:build", "--batch", 1], "MultiheadAttention takes no input_ids"),
        (["not_there:build"], "not_there"),
    ):
        failed = command(*words)
        assert failed.exit_code == 2
        assert message in failed.stderr


def test_names_on_a_hub_are_not_downloaded(tmp_path: Path) -> None:
    failed = command("meta-llama/Llama-3.2-1B")
    assert failed.exit_code == 2
    assert "nothing is downloaded" in failed.stderr
    (tmp_path / "config.json").write_text('{"model_type": "not-a-model"}')
    failed = command(tmp_path)
    assert failed.exit_code == 2
    assert "not-a-model" in failed.stderr
