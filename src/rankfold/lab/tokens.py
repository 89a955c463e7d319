"""Tokenizers (plain bytes, and GPT-2's byte pairs by way of tiktoken) and the token store."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Progress = Callable[[str, int, int], None]
TOKENIZERS = ("bytes", "gpt2")

# Characters encoded at once: enough to keep threads busy, little enough to show progress.
_CHUNK = 1 << 22
# Changes when what a cached folder holds does.
_FORMAT = 1
_BITS = (1 << 64) - 1
# 2⁶⁴ over the golden ratio.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_GPT2_RANKS = 50256
_GPT2_END_OF_TEXT = "<|endoftext|>"
# Equivalent to the pattern GPT-2 was released with; possessive, so that long runs do not backtrack.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class DataError(ValueError):
    """What is wrong with the data or how it was asked for, in one sentence for the user."""


def optional_module(name: str, purpose: str, extra: str = "lab") -> Any:
    """Import a module that only an ``extra`` installs, or say how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(f"{purpose} needs {package}: pip install 'rankfold[{extra}]'") from error


class Tokenizer(Protocol):
    """What a corpus needs to know of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """How many different tokens there are, end-of-text among them."""

    @property
    def end_of_text(self) -> int:
        """The token between documents, which no text encodes to."""

    @property
    def identity(self) -> str:
        """A string that differs where encodings may differ; found without loading anything."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Tokens of each text, one array ``(length,)`` a text, without end-of-text."""


class ByteTokenizer:
    """UTF-8 bytes as they are; 256 is end-of-text."""

    vocabulary = 257
    end_of_text = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Bytes of each text; a lone surrogate, which UTF-8 cannot say, becomes ``?``."""
        return [np.frombuffer(text.encode("utf8", "replace"), np.uint8) for text in texts]


class GPT2Tokenizer:
    """GPT-2's byte pairs, from a file of ranks or else from tiktoken's own cache or download."""

    vocabulary = _GPT2_RANKS + 1
    end_of_text = _GPT2_RANKS

    def __init__(self, ranks: str | None = None) -> None:
        self._path = ranks
        self._content = None if ranks is None else _read_ranks(ranks)

    @property
    def identity(self) -> str:
        """Names the content of the ranks file, not its path."""
        if self._content is None:
            return "gpt2"
        return f"gpt2 {hashlib.sha256(self._content).hexdigest()}"

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Tokens of each text; text that spells a special token is ordinary text."""
        encoded = self._encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)
        return [np.array(tokens, np.uint32) for tokens in encoded]

    @cached_property
    def _encoding(self) -> Any:
        tiktoken = optional_module("tiktoken", "the gpt2 tokenizer")
        if self._content is not None:
            return tiktoken.Encoding(
                "gpt2",
                pat_str=_GPT2_PATTERN,
                mergeable_ranks=_parse_ranks(self._content, self._path),
                special_tokens={_GPT2_END_OF_TEXT: self.end_of_text},
                explicit_n_vocab=self.vocabulary,
            )
        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:
            raise DataError(
                "tiktoken could not download the gpt2 tokenizer: "
                f"give the path of a gpt2.tiktoken file as --ranks ({error})"
            ) from error


def make_tokenizer(name: str, ranks: str | None = None) -> Tokenizer:
    """The tokenizer of that name; cheap, since GPT-2's tables are built when first used."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(ranks)
    raise DataError(f"unknown tokenizer {name!r}; there are {', '.join(TOKENIZERS)}")


def _read_ranks(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the ranks file {path}: {error.strerror}") from error


def _parse_ranks(content: bytes, path: str | None) -> dict[bytes, int]:
    # tiktoken's own reader keeps local files by their path, and so returns what a path once held.
    try:
        pairs = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise DataError(
            f"{path} is not a ranks file: a line is a base64 token and a rank"
        ) from error
    if sorted(ranks.values()) != list(range(_GPT2_RANKS)):
        raise DataError(f"{path} must hold the {_GPT2_RANKS} ranks of GPT-2, got {len(ranks)}")
    return ranks


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as tokens: ``len()`` of them, ``[i]`` the tokens ``(length,)`` of one.

    ``values`` ``(tokens,)`` has all tokens of a source without end-of-text, ``offsets``
    ``(documents + 1,)`` where each document starts, ``chosen`` which of them are meant here.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]
    chosen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> NDArray[Any]:
        document = self.chosen[number]
        return self.values[self.offsets[document] : self.offsets[document + 1]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each document, ``(len(self),)``."""
        return np.diff(self.offsets)[self.chosen]


def scrambled(count: int, *salts: int) -> NDArray[np.uint64]:
    """A fixed pseudo-random number for each index below ``count``, ``(count,)``.

    Ours rather than numpy's generators', whose streams may change from version to version.
    """
    start = np.zeros(1, np.uint64)
    for salt in salts:
        start = _splitmix(start + np.uint64(salt & _BITS))
    return _splitmix(start + np.arange(count, dtype=np.uint64) * GOLDEN)


def _splitmix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = state + GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    ``identity``, which JSON can hold, differs where documents may differ. At most ``limit`` of
    them are read (None: all); ``total`` is how many there are, 0 if that is not known.
    """

    name: str
    identity: Any
    read: Callable[[], Iterator[str]]
    limit: int | None
    total: int


def stored(source: Source, tokenizer: Tokenizer, cache: Path, progress: Progress) -> Tokens:
    """The tokens of a source from the folder ``cache``, where they are put if not there yet."""
    dtype = "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"
    about = {
        "format": _FORMAT,
        "source": source.identity,
        "documents": source.limit,
        "tokenizer": tokenizer.identity,
        "dtype": dtype,
    }
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    folder = cache / key
    if not folder.is_dir():
        partial = cache / f".{key}-{uuid.uuid4().hex}"
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise OSError(
                f"cannot keep tokens in {cache}: {error.strerror}; RANKFOLD_CACHE names another "
                "folder"
            ) from error
        try:
            (partial / "about.json").write_text(json.dumps(about, indent=1), encoding="utf8")
            _write(partial, source, tokenizer, dtype, progress)
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    # Plain views of the mapped files: slices of numpy's memmap class cost several times more.
    values = np.asarray(np.memmap(folder / "tokens.bin", dtype, "r"))
    offsets = np.asarray(np.load(folder / "offsets.npy", mmap_mode="r"))
    return Tokens(values, offsets, np.arange(len(offsets) - 1))


def _publish(partial: Path, folder: Path) -> None:
    try:
        os.replace(partial, folder)
    except OSError:
        # Another process may have been first with the same tokens; theirs will do.
        if not folder.is_dir():
            raise


def _write(
    folder: Path, source: Source, tokenizer: Tokenizer, dtype: str, progress: Progress
) -> None:
    offsets = [0]
    with (folder / "tokens.bin").open("wb") as file:
        for texts in _chunks(islice(source.read(), source.limit)):
            for tokens in tokenizer.encode(texts):
                file.write(tokens.astype(dtype).tobytes())
                offsets.append(offsets[-1] + len(tokens))
            progress(f"tokenizing {source.name}", len(offsets) - 1, source.total)
    if not offsets[-1]:
        raise DataError(f"{source.name} has no text in it: give another source")
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))


def _chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in documents:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
