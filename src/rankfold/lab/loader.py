"""Batches of samples from tokenized documents, packed as in the paper.

Documents come in some order, each with end-of-text before it, and are cut into samples of
``context`` tokens that cross from document to document. Once ``batch`` samples are complete, what
is left of the last document is dropped, so a batch always starts with a fresh document and the
number of documents used so far is the whole state.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .corpus import DataConfig
from .tokens import DataError, Tokens, scrambled

# A text of fewer documents than this, of which a pass sees a smaller share, is one that its user
# took for a long one.
_FEW_DOCUMENTS, _SMALL_SHARE = 32, 0.1


class Loader:
    """Training batches without end, in an order that follows from seed and epoch alone."""

    def __init__(self, tokens: Tokens, config: DataConfig, end_of_text: int, seed: int) -> None:
        _check_enough(tokens, config, "training")
        _check_use(tokens, config)
        self._tokens = tokens
        self._config = config
        self._end_of_text = end_of_text
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order, self._ends = self._shuffled()

    def next(self) -> NDArray[np.int64]:
        """The next batch, ``(batch, context)``; a batch an epoch cannot complete is dropped."""
        size = self._config.batch * self._config.context
        stop = _stop(self._ends, self._position, size)
        if stop is None:
            self._go_to(self._epoch + 1, position=0)
            return self.next()
        documents = self._order[self._position : stop]
        self._position = stop
        return _packed(self._tokens, documents, self._config, self._end_of_text)

    def state_dict(self) -> dict[str, int]:
        """The epoch and how many documents of its order are used: enough to continue exactly."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where a loader of the same corpus, batch shape and seed left off."""
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= len(self._tokens):
            raise DataError(
                f"the loader's state (epoch {epoch}, position {position}) is of another corpus: "
                f"this one has {len(self._tokens)} training documents"
            )
        self._go_to(epoch, position)

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order, self._ends = self._shuffled()

    def _shuffled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Documents in this epoch's order, and tokens up to the end of each."""
        keys = scrambled(len(self._tokens), self._seed, self._epoch)
        order = np.argsort(keys, kind="stable")
        return order, np.cumsum(self._tokens.lengths[order] + 1)


class ValidationCycle:
    """The same batches in the same order for every run: one pass over documents as stored."""

    def __init__(self, tokens: Tokens, config: DataConfig, end_of_text: int) -> None:
        _check_enough(tokens, config, "validation")
        self._tokens = tokens
        self._config = config
        self._end_of_text = end_of_text
        self._bounds = _bounds(tokens, config.batch * config.context)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def batch(self, number: int) -> NDArray[np.int64]:
        """Batch ``number`` modulo how many there are, ``(batch, context)``."""
        place = number % len(self)
        documents = np.arange(self._bounds[place], self._bounds[place + 1])
        return _packed(self._tokens, documents, self._config, self._end_of_text)


def _check_enough(tokens: Tokens, config: DataConfig, which: str) -> None:
    have = int(tokens.lengths.sum()) + len(tokens)
    need = config.batch * config.context
    if have < need:
        raise DataError(
            f"the {which} documents have {have} tokens and one batch of {config.batch} x "
            f"{config.context} needs {need}: give more text or make batch or context smaller"
        )


def _check_use(tokens: Tokens, config: DataConfig) -> None:
    have = int(tokens.lengths.sum()) + len(tokens)
    share = len(tokens) * config.batch * config.context / have
    if len(tokens) < _FEW_DOCUMENTS and share < _SMALL_SHARE:
        one = len(tokens) == 1
        there_are = "there is but 1 document" if one else f"there are but {len(tokens)} documents"
        warnings.warn(
            f"training sees at most {share:.1%} of these {have:,} tokens, nearly the same in every "
            f"pass: a batch begins with a new document, and {there_are}; part the text into more, "
            "in a text file by NUL bytes",
            stacklevel=3,
        )


def _bounds(tokens: Tokens, size: int) -> list[int]:
    """Where batches start in the stored order, and where the last one stops."""
    ends = np.cumsum(tokens.lengths + 1)
    bounds = [0]
    while (stop := _stop(ends, bounds[-1], size)) is not None:
        bounds.append(stop)
    return bounds


def _stop(ends: NDArray[np.int64], start: int, size: int) -> int | None:
    """One past the document that completes ``size`` tokens from document ``start`` on, if any."""
    before = int(ends[start - 1]) if start else 0
    last = int(np.searchsorted(ends, before + size))
    return last + 1 if last < len(ends) else None


def _packed(
    tokens: Tokens, documents: NDArray[Any], config: DataConfig, end_of_text: int
) -> NDArray[np.int64]:
    """End-of-text and tokens of each document in turn, cut off at ``(batch, context)``."""
    flat = np.empty(config.batch * config.context, np.int64)
    filled = 0
    for document in documents:
        flat[filled] = end_of_text
        text = tokens[int(document)][: len(flat) - filled - 1]
        flat[filled + 1 : filled + 1 + len(text)] = text
        filled += 1 + len(text)
    return flat.reshape(config.batch, config.context)
