"""Models as `rankfold inspect` is told them, with random weights, and a loss on random tokens."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .records import read_object

_TOKENS = 32  # in each sequence, or as many as the model has positions for


def model_named(text: str, *, real: bool) -> nn.Module:
    """The model of a local transformers configuration, or what ``module:factory`` returns.

    Args:
        text: a folder with a config.json, that file itself, or the import path of a function or
            class that takes no arguments.
        real: whether values are needed. Without them transformers' models are built on the meta
            device, which takes neither time nor memory, whatever their size.
    """
    path = Path(text)
    file = path / "config.json" if path.is_dir() else path
    if "model_type" in read_object(file):
        return _from_config(file, real)
    module, colon, factory = text.partition(":")
    if colon and module and factory and not path.exists():
        return _from_factory(module, factory)
    if path.is_dir() and file.exists():
        raise ValueError(f"{str(file)!r} has no model_type: it is no transformers configuration")
    missing = f"there is no {text!r}"
    if path.exists():
        missing = f"there is no run in {text!r}, and no transformers config.json either"
    raise FileNotFoundError(
        f"{missing}; a model is a local folder (nothing is downloaded: save a configuration with "
        "config.save_pretrained), or a function as module:factory"
    )


def token_loss(model: Any, sequences: int) -> Callable[[], Tensor]:
    """A smooth function of the model's first output on random tokens."""
    accepts = inspect.signature(model.forward).parameters
    if "input_ids" not in accepts and getattr(model, "main_input_name", None) != "input_ids":
        raise ValueError(f"--batch makes tokens, and {type(model).__name__} takes no input_ids")
    config = getattr(model, "config", None)
    limits = (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions"))
    length = min([_TOKENS, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(vocabulary, (sequences, length), generator=generator)
    inputs = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens.flip(0)

    def loss() -> Tensor:
        output = model(**inputs)
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        # Not the sum of squares, which a last norm would make a constant.
        weights = torch.randn(first.shape, generator=generator.manual_seed(1))
        return (first * weights).mean()

    return loss


def _from_config(file: Path, real: bool) -> nn.Module:
    try:
        library: Any = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise ValueError(f"{file} needs transformers: pip install transformers") from None
    try:
        config = library.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (OSError, KeyError) as error:
        raise ValueError(f"transformers cannot read {file}: {error}") from None
    named = (getattr(library, name, None) for name in config.architectures or ())
    kind = next((each for each in named if each is not None), None)

    def build() -> nn.Module:
        model: nn.Module = kind(config) if kind else library.AutoModel.from_config(config)
        return model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        if real:
            return build().eval()
        try:
            with torch.device("meta"):
                return build()
        except RuntimeError:  # a constructor that looks at values, which meta tensors have none of
            return build()


def _from_factory(module: str, factory: str) -> nn.Module:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    finally:
        sys.path.remove(here)
    build = getattr(found, factory, None)
    if not callable(build):
        raise ValueError(f"{module} has no function {factory!r}")
    model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{module}:{factory} returned a {type(model).__name__}, not a module")
    return model
