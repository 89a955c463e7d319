"""What `torch.compile` is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

# Untyped in torch.
_disable: Callable[..., Any] = torch.compiler.disable
_assume_constant: Callable[..., Any] = torch.compiler.assume_constant_result
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Run the function as it is written, with all that it calls."""
    return cast(F, _disable(function))


def uncompiled_itself(function: F) -> F:
    """Run the function as it is written; what it calls may be compiled."""
    return cast(F, _disable(function, recursive=False))


def constant_when_compiled(function: F) -> F:
    """Ask the function once, while code is compiled, and take its answer for what it always is."""
    return cast(F, _assume_constant(function))
