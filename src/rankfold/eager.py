"""What `torch.compile` is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_disable: Callable[..., Any] = torch.compiler.disable  # untyped in torch
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Run the function as it is written, with all that it calls."""
    return cast(F, _disable(function))


def uncompiled_itself(function: F) -> F:
    """Run the function as it is written; what it calls may be compiled."""
    return cast(F, _disable(function, recursive=False))
