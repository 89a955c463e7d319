"""LoRA that starts at full rank: the model is unchanged, and what is saved is plain LoRA."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_riemannian_optimizer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rankfold import Factor, Grid, RiemannianSGD, full_rank_start_


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def adapted(seed: int = 0, name: str = "default", **options: Any) -> Any:
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["up", "down"], **options}
    return peft.get_peft_model(Net(), peft.LoraConfig(**settings), adapter_name=name)


def grids_of(model: Any, name: str = "default") -> list[Grid]:
    return [
        Grid(m.lora_B[name].weight, Factor(m.lora_A[name].weight, axis=0))
        for m in model.modules()
        if hasattr(m, "lora_A")
    ]


def trained(model: Any, x: Tensor, name: str = "default") -> None:
    optimizer = RiemannianSGD(grids_of(model, name), 0.05, geometry="fixed-embedded")
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


X = torch.randn(7, 12, generator=torch.Generator().manual_seed(9))


def test_the_model_is_unchanged_and_the_adapter_of_full_rank() -> None:
    model = adapted()
    base = {k: v.clone() for k, v in model.state_dict().items() if "lora" not in k}
    before = model(X)
    full_rank_start_(model, size=0.3)
    torch.testing.assert_close(model(X), before, rtol=1e-5, atol=1e-6)
    for grid in grids_of(model):
        b, a = grid.left[0].param, grid.right[0].param
        values = torch.linalg.svdvals(b @ a)[:4]
        torch.testing.assert_close(values, torch.full((4,), 0.3))
    for k, v in base.items():
        assert torch.equal(model.state_dict()[k], v)


@pytest.mark.parametrize("name", ["default", "mine"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"rank_pattern": {"down": 3}, "alpha_pattern": {"down": 5}}],
)
def test_plain_peft_loads_what_is_saved(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(name=name, **options)
    before = model(X)
    start = full_rank_start_(model, adapter=name)
    trained(model, X, name)
    expected = model(X)
    assert (expected - before).norm() > 0.05 * before.norm()
    start.save(tmp_path)
    torch.manual_seed(0)
    folder = tmp_path if name == "default" else tmp_path / name
    loaded: Any = peft.PeftModel.from_pretrained(Net(), str(folder))
    torch.testing.assert_close(loaded(X), expected, rtol=1e-5, atol=1e-6)
    assert loaded.peft_config["default"].r == 8


def test_a_run_goes_on_from_its_seed_and_the_weights_alone() -> None:
    model = adapted()
    full_rank_start_(model, seed=3)
    trained(model, X)
    state = peft.get_peft_model_state_dict(model)
    again = adapted()
    full_rank_start_(again, seed=3)
    peft.set_peft_model_state_dict(again, state)
    assert torch.equal(again(X), model(X))
    other = adapted()
    full_rank_start_(other, seed=4)
    peft.set_peft_model_state_dict(other, state)
    assert not torch.allclose(other(X), model(X))


def test_a_compiled_model_starts_where_the_model_does(tmp_path: Path) -> None:
    """So that a run goes on whether or not it is compiled."""
    model, other = adapted(), adapted()
    full_rank_start_(model)
    compiled: Any = torch.compile(other, backend="eager")
    start = full_rank_start_(compiled)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    trained(other, X)
    expected = other(X)
    start.save(tmp_path)
    torch.manual_seed(0)
    loaded: Any = peft.PeftModel.from_pretrained(Net(), str(tmp_path))
    torch.testing.assert_close(loaded(X), expected, rtol=1e-5, atol=1e-6)


def test_without_the_adapter_it_is_the_base_model() -> None:
    model = adapted()
    plain = model(X)
    start = full_rank_start_(model)
    trained(model, X)
    with model.disable_adapter():
        assert torch.equal(model(X), plain)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up", "down"]))
    model.set_adapter("other")
    torch.testing.assert_close(model(X), plain)
    model.set_adapter("default")
    kept = model(X)
    start.remove()
    assert not torch.allclose(model(X), kept)


class Turned(Net):
    """Weights stored the other way, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Conv1D(20, 12), Conv1D(12, 20)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Net, Turned])
def test_merged_weights_compute_the_same(kind: type[nn.Module]) -> None:
    """In the model, taken out again, and in a copy that is a plain model afterwards."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["up", "down"], fan_in_fan_out=kind is Turned
    )
    model: Any = peft.get_peft_model(kind(), config)
    start = full_rank_start_(model, size=0.5)
    trained(model, X)
    copied = copy.deepcopy(model)
    trained(model, X)
    for each in (model, copied):
        expected = each(X)
        each.merge_adapter()
        torch.testing.assert_close(each(X), expected, rtol=1e-5, atol=1e-6)
        if each is model:
            with pytest.raises(RuntimeError, match="unmerge it first"):
                start.remove()
        each.unmerge_adapter()
        torch.testing.assert_close(each(X), expected, rtol=1e-5, atol=1e-6)
        plain = copy.deepcopy(each).merge_and_unload()
        torch.testing.assert_close(plain(X), expected, rtol=1e-5, atol=1e-6)
    start.remove()
    removed = model(X)
    assert not torch.allclose(removed, expected)
    torch.testing.assert_close(model.merge_and_unload()(X), removed, rtol=1e-5, atol=1e-6)


def test_a_model_in_a_file_takes_away_what_it_began_with(tmp_path: Path) -> None:
    model = adapted()
    full_rank_start_(model)
    trained(model, X)
    expected = model(X)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(X), expected)
    plain = loaded.merge_and_unload()
    torch.testing.assert_close(plain(X), expected, rtol=1e-5, atol=1e-6)
    assert not any("full_rank_start" in name for name in model.state_dict())


def test_what_is_taken_away_goes_where_the_model_goes() -> None:
    model = adapted()
    start = full_rank_start_(model)
    begun = [x for name, x in model.named_buffers() if "full_rank_start" in name]
    assert len(begun) == 2 * len(start._layers)
    model.to(torch.bfloat16)
    x = X.bfloat16()
    with model.disable_adapter():
        plain = model(x)
    kept = model(x)
    start.remove()
    assert (kept - plain).norm() < 0.05 * (model(x) - plain).norm()
    assert all(x.dtype == torch.bfloat16 for n, x in model.named_buffers() if "start" in n)
    assert all(x.is_meta for n, x in model.to("meta").named_buffers() if "start" in n)


def test_a_layer_in_two_places_starts_once() -> None:
    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.up

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["up", "again", "down"])
    model: Any = peft.get_peft_model(Twice(), config)
    model.base_model.model.again = model.base_model.model.up
    before = model(X)
    full_rank_start_(model)
    torch.testing.assert_close(model(X), before, rtol=1e-5, atol=1e-6)


def test_what_is_no_plain_lora_is_refused() -> None:
    begun = adapted()
    full_rank_start_(begun)
    with pytest.raises(ValueError, match="has begun already"):
        full_rank_start_(begun)
    with pytest.raises(ValueError, match="DoRA"):
        full_rank_start_(adapted(use_dora=True))
    with pytest.raises(ValueError, match="no LoRA layers with an adapter 'x'"):
        full_rank_start_(adapted(), adapter="x")
    merged = adapted()
    merged.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        full_rank_start_(merged)
    convolution = nn.Sequential(nn.Conv2d(2, 3, 1))
    config = peft.LoraConfig(r=2, target_modules=["0"])
    with pytest.raises(ValueError, match="no matrices but a convolution"):
        full_rank_start_(peft.get_peft_model(convolution, config))
    embedding = nn.Sequential(nn.Embedding(5, 4))
    with pytest.raises(ValueError, match="an embedding"):
        full_rank_start_(peft.get_peft_model(embedding, config))


def test_the_same_step_as_pefts_own_riemannian_optimizer() -> None:
    """Where both are there: SGD for a base, its ridge as damping, gradients as they come."""
    ours, theirs = adapted(), adapted()
    for model in (ours, theirs):
        full_rank_start_(model, size=0.5)
    options: dict[str, Any] = {"normalize": None, "gradient_repair": "none", "damping": 1e-2}
    optimizers = (
        RiemannianSGD(grids_of(ours), 0.1, geometry="fixed-quotient", **options),
        create_riemannian_optimizer(theirs, torch.optim.SGD, lr=0.1, reg=1e-2),
    )
    for _ in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
    expected = dict(theirs.named_parameters())
    fresh = dict(adapted().named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p, expected[name], rtol=1e-5, atol=1e-6)
        assert not p.requires_grad or not torch.allclose(p, fresh[name], atol=1e-3)


def test_the_default_device_is_not_drawn_on() -> None:
    model = adapted()
    with torch.device("meta"):
        full_rank_start_(model)
    for grid in grids_of(model):
        assert all(p.count_nonzero() for p in grid.params())
