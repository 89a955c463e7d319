"""Documents as they are read back, for tests of the laboratory's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankfold.lab.corpus import DataConfig, prepare
from rankfold.lab.tokens import Tokens


def texts(tokens: Tokens) -> list[str]:
    return [bytes(tokens[i].tolist()).decode("utf8") for i in range(len(tokens))]


def read(source: Path | str, cache: Path, **options: Any) -> list[str]:
    """All documents of a source, in order, by way of the second source of a corpus."""
    config = DataConfig(source=str(source), validation=str(source), **options)
    corpus = prepare(config, cache)
    assert texts(corpus.training) == texts(corpus.validation)
    return texts(corpus.training)
