"""Batches of samples from tokenized documents.

Documents come in some order, each with end-of-text before it, as one stream of tokens, which is cut
into samples of ``context`` tokens that cross from document to document. ``data.shuffle`` says what
of a pass over the text comes in random order:

- "documents", as in the paper. Once ``batch`` samples in a row are complete, what is left of the
  last document is dropped, so a batch always starts with a fresh document.
- "samples": those of the whole stream too, so that a batch has parts of many documents, and nothing
  is dropped but what fills no batch at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

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
        if config.shuffle == "documents":
            _check_use(tokens, config)
        self._tokens = tokens
        self._config = config
        self._end_of_text = end_of_text
        self._seed = seed
        self._go_to(epoch=0, position=0)

    def _go_to(self, epoch: int, position: int) -> None:
        order = _shuffled(len(self._tokens), self._seed, epoch)
        stream = _Stream(self._tokens, order, self._end_of_text)
        self._pass: _Documents | _Samples
        if self._config.shuffle == "documents":
            self._pass = _Documents(stream, self._config)
        else:
            self._pass = _Samples(stream, self._config, self._seed, epoch)
        self._epoch, self._position = epoch, position

    def next(self) -> NDArray[np.int64]:
        """The next batch, ``(batch, context)``; a batch an epoch cannot complete is dropped."""
        taken = self._pass.take(self._position)
        if taken is None:
            self._go_to(self._epoch + 1, position=0)
            return self.next()
        batch, self._position = taken
        return batch

    def state_dict(self) -> dict[str, int]:
        """The epoch and how much of its order is used: enough to continue exactly."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where a loader of the same corpus, configuration and seed left off."""
        epoch, position = state["epoch"], state["position"]
        # As many in every epoch.
        if epoch < 0 or not 0 <= position <= self._pass.count:
            raise DataError(
                f"the loader's state (epoch {epoch}, position {position}) is of another corpus: "
                f"this one has {self._pass.count} training {self._config.shuffle}"
            )
        self._go_to(epoch, position)


class ValidationCycle:
    """The same batches in the same order for every run: one pass over documents as stored."""

    def __init__(self, tokens: Tokens, config: DataConfig, end_of_text: int) -> None:
        _check_enough(tokens, config, "validation")
        stream = _Stream(tokens, np.arange(len(tokens)), end_of_text)
        self._pass = _Documents(stream, config)
        self._starts = self._pass.starts()

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Batch ``number`` modulo how many there are, ``(batch, context)``."""
        taken = self._pass.take(self._starts[number % len(self)])
        assert taken is not None
        return taken[0]


class _Stream:
    """Documents in an order, end-of-text before each, as one sequence of tokens."""

    def __init__(self, tokens: Tokens, order: NDArray[np.int64], end_of_text: int) -> None:
        self._tokens, self._order, self._end_of_text = tokens, order, end_of_text
        self.ends = np.cumsum(tokens.lengths[order] + 1)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def start(self, document: int) -> int:
        """Where a document of the order begins, with its end-of-text."""
        return int(self.ends[document - 1]) if document else 0

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """``count`` tokens, of which the first is number ``start``."""
        read = np.empty(count, np.int64)
        document = int(np.searchsorted(self.ends, start, side="right"))
        skipped, filled = start - self.start(document), 0
        while filled < count:
            if not skipped:
                read[filled] = self._end_of_text
                filled, skipped = filled + 1, 1
            text = self._tokens[int(self._order[document])][skipped - 1 :][: count - filled]
            read[filled : filled + len(text)] = text
            document, skipped, filled = document + 1, 0, filled + len(text)
        return read


class _Documents:
    """A pass whose batches begin with fresh documents; a position is how many are used."""

    def __init__(self, stream: _Stream, config: DataConfig) -> None:
        self._stream = stream
        self._shape = config.batch, config.context
        self._size = config.batch * config.context
        self.count = len(stream.ends)

    def take(self, position: int) -> tuple[NDArray[np.int64], int] | None:
        """The batch there and the position behind it, if the pass has one."""
        after = self._after(position)
        if after is None:
            return None
        batch = self._stream.read(self._stream.start(position), self._size)
        return batch.reshape(self._shape), after

    def starts(self) -> list[int]:
        """The positions of all batches."""
        found, position = [], 0
        while (after := self._after(position)) is not None:
            found.append(position)
            position = after
        return found

    def _after(self, position: int) -> int | None:
        """One past the document that completes a batch."""
        stop = self._stream.start(position) + self._size
        last = int(np.searchsorted(self._stream.ends, stop))
        return last + 1 if last < self.count else None


class _Samples:
    """A pass over all samples of a stream in random order; a position is how many are used."""

    def __init__(self, stream: _Stream, config: DataConfig, seed: int, epoch: int) -> None:
        self._stream = stream
        self._batch, self._context = config.batch, config.context
        self.count = len(stream) // config.context
        # One more number than documents are shuffled by, for an order of its own.
        self._order = _shuffled(self.count, seed, epoch, 1)

    def take(self, position: int) -> tuple[NDArray[np.int64], int] | None:
        """The batch there and the position behind it, if the pass has one."""
        after = position + self._batch
        if after > self.count:
            return None
        chosen = self._order[position:after]
        samples = [self._stream.read(int(i) * self._context, self._context) for i in chosen]
        return np.stack(samples), after


def _shuffled(count: int, *salts: int) -> NDArray[np.int64]:
    return np.argsort(scrambled(count, *salts), kind="stable")


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
            f"pass: a batch begins with a new document, and {there_are}; set data.shuffle to "
            "samples, or part the text into more, in a text file by NUL bytes",
            stacklevel=3,
        )
