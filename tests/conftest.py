"""Settings all tests share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rankfold import kernels, tall

from .interpreted import CUDA, INTERPRETED

# Test tensors are small: threads cost more than they bring, and two test processes run at once.
torch.set_num_threads(1)

_INSTRUCTIONS = "ONEDNN_MAX_CPU_ISA"
_PRODUCT = (
    "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep to instructions that this machine has.

    Some virtual machines name instructions for bfloat16 that they do not have. A process that
    multiplies such matrices then dies, and with it all tests that it had before it.
    """
    if hasattr(config, "workerinput") or _INSTRUCTIONS in os.environ or _multiplies({}):
        return
    for lesser in ("AVX512_CORE", "AVX2"):
        if _multiplies({_INSTRUCTIONS: lesser}):
            os.environ[_INSTRUCTIONS] = lesser  # of this process and all that it starts
            return


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say so if not all instructions were used."""
    if _INSTRUCTIONS in os.environ:
        lesser = os.environ[_INSTRUCTIONS]
        terminalreporter.write_line(
            f"{_INSTRUCTIONS}={lesser}, as it was set or as this machine needs"
        )


def _multiplies(settings: dict[str, str]) -> bool:
    command = [sys.executable, "-c", _PRODUCT]
    return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode == 0


@pytest.fixture
def kernels_imported() -> None:
    """Triton's kernels, in processes that run them."""
    if INTERPRETED or CUDA:
        assert kernels._importable()


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that ask for no values, as where the host would have to wait for them."""
    monkeypatch.setattr(tall, "can_ask", lambda x: False)
