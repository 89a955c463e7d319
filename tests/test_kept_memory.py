"""On a CPU a step asks the system for no memory that an earlier one has freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource
import torch, rankfold

torch.set_num_threads(1)
weights = [torch.nn.Parameter(torch.randn(512, 512)) for _ in range(6)]
q, k = ([rankfold.Factor(w, axis=0, blocks=8) for w in side] for side in (weights[:3], weights[3:]))
grids = [rankfold.Grid(a, b, groups=8) for a, b in zip(q, k)]
optimizer = rankfold.RiemannianSGD(
    grids, 0.01, geometry="fixed-quotient", gradient_repair="average", momentum={momentum}
)
for w in weights:
    w.grad = torch.randn_like(w)
for _ in range(4):
    optimizer.step()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # memory may grow once more
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks how the GNU C library does")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_page_faults(momentum: float) -> None:
    plain = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEPS.format(momentum=momentum)],
        env=plain,
        capture_output=True,
        text=True,
        check=True,
    )
    # The factors alone are 1,536 pages, and a step that loses its memory takes 3,000 and more.
    assert int(done.stdout) < 100
