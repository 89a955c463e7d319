"""Settings all tests share."""

from __future__ import annotations

import torch

# Test tensors are small: threads cost more than they bring, and two test processes run at once.
torch.set_num_threads(1)
