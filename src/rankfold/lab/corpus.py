"""From a source of text to documents to a memory-mapped store of tokens, made once and kept."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .tokens import (
    GOLDEN,
    DataError,
    Progress,
    Source,
    Tokens,
    make_tokenizer,
    optional_module,
    stored,
)

__all__ = ["SHUFFLES", "Corpus", "DataConfig", "DataError", "Progress", "Tokens", "prepare"]

SHUFFLES = ("documents", "samples")
_FINEWEB = "hf:HuggingFaceFW/fineweb:sample-10BT"
_STREAMED_DOCUMENTS = 100_000
_PYTHON_PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "html", "json", "logging", "re",
)  # fmt: skip
_PYTHON_BYTES = 6_000_000
# Characters read at once, so that a large file need not fit into memory.
_PIECE = 1 << 22


@dataclass(frozen=True)
class DataConfig:
    """What to train on and in which pieces.

    ``source`` and ``validation`` are ``"python"`` (the standard library's own text), a file or
    folder, ``"hf:NAME"`` or ``"hf:NAME:CONFIG"``, or ``"fineweb"``. Without ``validation`` a fixed
    ``validation_share`` of the source's documents is set apart. ``documents`` bounds how many are
    read of each source; 0 means all of a local one and 100,000 of a stream. ``shuffle`` is what
    of a pass over the text comes in random order, "documents" or "samples" (`lab/loader.py`).
    """

    source: str = "python"
    validation: str | None = None
    validation_share: float = 0.02
    tokenizer: str = "bytes"
    ranks: str | None = None
    context: int = 512
    batch: int = 8
    documents: int = 0
    shuffle: str = "documents"

    def __post_init__(self) -> None:
        for name, least in (("context", 2), ("batch", 1), ("documents", 0)):
            if getattr(self, name) < least:
                raise DataError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.validation_share < 1:
            raise DataError(f"validation_share must be in (0, 1), got {self.validation_share}")
        if self.shuffle not in SHUFFLES:
            raise DataError(f"shuffle is one of {', '.join(SHUFFLES)}, not {self.shuffle!r}")


@dataclass(frozen=True)
class Corpus:
    """Training and validation documents and the tokenizer's two numbers."""

    training: Tokens
    validation: Tokens
    vocabulary: int
    end_of_text: int

    @cached_property
    def fingerprint(self) -> str:
        """Differs where tokens or documents do, whatever their files are called and dated."""
        whole = hashlib.sha256()
        sides = (self.training, self.validation)
        for values in {id(side.values): side.values for side in sides}.values():
            whole.update(np.ascontiguousarray(values).data)
        for side in sides:
            for numbers in (side.offsets, side.chosen):
                whole.update(np.ascontiguousarray(numbers).data)
        return whole.hexdigest()


def _silent(label: str, done: int, total: int) -> None:
    pass


def prepare(config: DataConfig, cache: Path | None = None, progress: Progress = _silent) -> Corpus:
    """Tokenize what ``config`` names, or open it where that was done before.

    ``progress`` is told what is being done, how many documents are done, and of how many (0 where
    that is not known). ``cache`` is a folder; None is ``$RANKFOLD_CACHE`` or
    ``~/.cache/rankfold/tokens``.
    """
    tokenizer = make_tokenizer(config.tokenizer, config.ranks)
    folder = _default_cache() if cache is None else cache
    every = stored(_source(config.source, config.documents), tokenizer, folder, progress)
    if config.validation is None:
        training, validation = _split(every, config.validation_share)
    else:
        training = every
        held_out = _source(config.validation, config.documents)
        validation = stored(held_out, tokenizer, folder, progress)
    return Corpus(training, validation, tokenizer.vocabulary, tokenizer.end_of_text)


def _split(every: Tokens, share: float) -> tuple[Tokens, Tokens]:
    # Multiples of the golden ratio: any first documents, however few, have their share set apart.
    apart = np.arange(len(every), dtype=np.uint64) * GOLDEN < np.uint64(share * 2.0**64)
    if apart.all():
        raise DataError(
            f"setting a share of {share} of {len(every)} documents apart for validation leaves "
            "none to train on: give a validation source, or more documents; in a text file a NUL "
            "byte parts them, and a batch begins with a new one"
        )
    training, validation = (
        Tokens(every.values, every.offsets, every.chosen[side]) for side in (~apart, apart)
    )
    return training, validation


def _default_cache() -> Path:
    named = os.environ.get("RANKFOLD_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "rankfold" / "tokens"


# -- sources of documents


def _source(name: str, documents: int) -> Source:
    name = _FINEWEB if name == "fineweb" else name
    if name.startswith("hf:"):
        limit = documents or _STREAMED_DOCUMENTS
        return Source(name, name, lambda: _streamed(name), limit, limit)
    identity: Any
    if name == "python":
        files = _python_files()
        identity = ["python", sys.version]
    else:
        files = _files(name)
        identity = [[str(path), *_stamp(path)] for path in files]
    one_each = all(_kind(path) in (".md", ".py") for path in files)
    total = min(documents or len(files), len(files)) if one_each else 0
    return Source(Path(name).name, identity, lambda: _read_files(files), documents or None, total)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _python_files() -> list[Path]:
    """The standard library's files, the same with every build of one Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(root.glob("*.py"))
    for package in _PYTHON_PACKAGES:
        found += sorted((root / package).rglob("*.py"))
    files: list[Path] = []
    size = 0
    for path in found:
        if path.name.startswith(("_sysconfigdata", "sitecustomize")):
            continue
        size += path.stat().st_size
        if size > _PYTHON_BYTES:
            break
        files.append(path)
    return files


def _files(name: str) -> list[Path]:
    root = Path(name).expanduser().resolve()
    known = ", ".join(_READERS)
    if root.is_file():
        if _kind(root) is None:
            raise DataError(f"{name} is of no known kind; there are {known}")
        return [root]
    if not root.is_dir():
        raise DataError(
            f"there is no source {name!r}: give 'python', 'fineweb', 'hf:NAME', 'hf:NAME:CONFIG' "
            "or the path of a file or folder"
        )
    files = [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and _kind(path) and not _hidden(path.relative_to(root))
    ]
    if not files:
        raise DataError(f"the folder {name} has no file of a known kind; there are {known}")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str | None:
    return next((kind for kind in _READERS if path.name.endswith(kind)), None)


def _read_files(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield from filter(None, _READERS[_kind(path) or ""](path))
        except DataError:
            raise
        except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
            raise DataError(f"cannot read {path}: {error}") from error


def _read_whole(path: Path) -> Iterator[str]:
    yield path.read_bytes().decode("utf8")


def _read_joined(path: Path) -> Iterator[str]:
    with path.open("rt", encoding="utf8", newline="") as file:
        yield from _apart(file)


def _read_joined_xz(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf8", newline="") as file:
        yield from _apart(file)


def _apart(file: TextIO) -> Iterator[str]:
    """Documents between NUL bytes, read piece by piece."""
    begun: list[str] = []
    while piece := file.read(_PIECE):
        first, *others = piece.split("\0")
        begun.append(first)
        for other in others:
            yield "".join(begun)
            begun = [other]
    yield "".join(begun)


def _read_json_lines(path: Path) -> Iterator[str]:
    with path.open("rt", encoding="utf8") as file:
        for line in filter(str.strip, file):
            yield _text_of(json.loads(line))


def _read_parquet(path: Path) -> Iterator[str]:
    parquet = optional_module("pyarrow.parquet", "a .parquet file")
    with parquet.ParquetFile(path) as file:
        if "text" not in file.schema_arrow.names:
            raise ValueError("it has no column 'text'")
        for group in range(file.num_row_groups):
            yield from map(_text_of, file.read_row_group(group, columns=["text"]).to_pylist())


def _streamed(name: str) -> Iterator[str]:
    datasets = optional_module("datasets", f"streaming {name}", extra="hub")
    _, dataset, *config = name.split(":", 2)
    try:
        rows = datasets.load_dataset(dataset, *(config or (None,)), split="train", streaming=True)
        yield from filter(None, map(_text_of, rows))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot stream {name}: {error}") from error


def _text_of(row: Any) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ValueError("a document has no text under 'text'")
    return text


_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": _read_joined,
    ".txt.xz": _read_joined_xz,
    ".md": _read_whole,
    ".py": _read_whole,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
