"""Where Triton kernels run in tests: on a GPU, or in Triton's interpreter in a process of its own.

The interpreter must be asked for before Triton is first imported, and would then hold for
everything else in the process. So without a GPU a test file skips its kernel tests but for one,
which runs the file again in a process where the interpreter is on.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"

in_kernels = pytest.mark.skipif(not (INTERPRETED or CUDA), reason="run by test_in_interpreter")
on_the_host = pytest.mark.skipif(INTERPRETED or CUDA, reason="the other tests run themselves")
# NumPy, which the interpreter computes with, warns where a GPU goes on with NaN and infinity.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def run_in_interpreter(path: str) -> None:
    """Run the tests of a file with the interpreter on, and fail with what they say."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", path]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As the kernels round: to nearest, but Triton's interpreter cuts bfloat16 off."""
    if INTERPRETED and dtype == torch.bfloat16:
        x = (x.view(torch.int32) & -(2**16)).view(torch.float32)
    return x.to(dtype)
