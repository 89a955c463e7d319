"""Settings all tests share."""

from __future__ import annotations

import pytest
import torch

from rankfold import tall

# Test tensors are small: threads cost more than they bring, and two test processes run at once.
torch.set_num_threads(1)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that ask for no values, as where the host would have to wait for them."""
    monkeypatch.setattr(tall, "can_ask", lambda x: False)
