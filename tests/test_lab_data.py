"""The laboratory's data: tokenizers, sources of documents, and their split."""

from __future__ import annotations

import base64
import json
import lzma
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankfold.lab.corpus import DataConfig, prepare
from rankfold.lab.loader import ValidationCycle
from rankfold.lab.tokens import DataError, make_tokenizer

from .lab_texts import read, texts


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# -- tokenizers


def test_bytes_are_utf8_and_lone_surrogates_are_marked() -> None:
    tokenizer = make_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (257, 256)
    assert [x.tolist() for x in tokenizer.encode(["aé", "", "\ud800"])] == [
        [97, 195, 169],
        [],
        [63],
    ]


def small_ranks(path: Path) -> Path:
    """A ranks file of GPT-2's size: all bytes, "ab", and pairs that no text here has."""
    pieces = [bytes([i]) for i in range(256)] + [b"ab"]
    pieces += [b"\xff" + i.to_bytes(3, "big") for i in range(50256 - len(pieces))]
    lines = [base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)]
    path.write_bytes(b"".join(lines))
    return path


def test_gpt2_from_a_ranks_file(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("tiktoken")
    ranks = str(small_ranks(tmp_path / "gpt2.tiktoken"))
    tokenizer = make_tokenizer("gpt2", ranks)
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (50257, 50256)
    assert [x.tolist() for x in tokenizer.encode(["cab ab", "ab"])] == [[99, 256, 32, 256], [256]]
    assert 50256 not in tokenizer.encode(["<|endoftext|>"])[0]

    (tmp_path / "a.txt").write_bytes(b"cab\0ab ab")
    config = DataConfig(str(tmp_path / "a.txt"), tokenizer="gpt2", ranks=ranks)
    corpus = prepare(config, cache)
    assert (corpus.vocabulary, corpus.end_of_text) == (50257, 50256)
    assert corpus.validation[0].tolist() == [99, 256]
    assert corpus.training[0].tolist() == [256, 32, 256]


def test_an_open_cache_needs_no_tiktoken(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken")
    ranks = small_ranks(tmp_path / "gpt2.tiktoken")
    (tmp_path / "a.txt").write_bytes(b"cab\0ab ab")
    config = DataConfig(str(tmp_path / "a.txt"), tokenizer="gpt2", ranks=str(ranks))
    prepare(config, cache)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert len(prepare(config, cache).training) == 1
    swapped = ranks.read_bytes().replace(b"YWI= 256", b"YWM= 256")
    ranks.write_bytes(swapped)
    with pytest.raises(DataError, match="needs tiktoken"):
        prepare(config, cache)


def test_gpt2_from_tiktoken_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_encoding(name: str) -> Any:
        return SimpleNamespace(
            encode_ordinary_batch=lambda batch, num_threads: [[7] for _ in batch]
        )

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=get_encoding))
    assert [x.tolist() for x in make_tokenizer("gpt2").encode(["a", "b"])] == [[7], [7]]


def test_errors_of_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_encoding(name: str) -> Any:
        raise ConnectionError("no network")

    with pytest.raises(DataError, match="unknown tokenizer 'words'; there are bytes, gpt2"):
        make_tokenizer("words")
    with pytest.raises(DataError, match=r"cannot read the ranks file .*none: No such file"):
        make_tokenizer("gpt2", str(tmp_path / "none"))
    monkeypatch.setitem(
        sys.modules, "tiktoken", SimpleNamespace(get_encoding=get_encoding, Encoding=None)
    )
    with pytest.raises(DataError, match=r"path of a gpt2.tiktoken file as --ranks \(no net"):
        make_tokenizer("gpt2").encode(["a"])
    ranks = tmp_path / "ranks"
    for content, message in ((b"not ranks at all", "is not a ranks file"), (b"YQ== 0", "got 1")):
        ranks.write_bytes(content)
        with pytest.raises(DataError, match=message):
            make_tokenizer("gpt2", str(ranks)).encode(["a"])
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match=r"needs tiktoken: pip install 'rankfold\[lab\]'"):
        make_tokenizer("gpt2").encode(["a"])


# -- sources


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=2)


def write_every_kind(folder: Path) -> list[str]:
    """One file of every kind and some that are skipped; returns documents in sorted order."""
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "hidden.md").write_text("hidden")
    (folder / "a.txt").write_bytes("one é\r\n".encode())
    (folder / "b.txt").write_bytes(b"two\0three\0\0four\0")
    with lzma.open(folder / "c.txt.xz", "wb") as file:
        file.write(b"five\r\n\0six")
    (folder / "d.md").write_text("# seven")
    (folder / "e.png").write_bytes(b"\x89PNG")
    rows = [json.dumps({"text": "eight", "id": 1}), "", json.dumps({"text": "nine\n"})]
    (folder / "f.jsonl").write_text("\n".join(rows))
    write_parquet(folder / "g.parquet", {"id": [1, 2, 3], "text": ["ten", "", "eleven"]})
    (folder / "sub" / "h.py").write_text("twelve = 12\n")
    (folder / "sub" / "empty.txt").write_text("")
    return [
        "one é\r\n", "two", "three", "four", "five\r\n", "six", "# seven", "eight", "nine\n",
        "ten", "eleven", "twelve = 12\n",
    ]  # fmt: skip


def test_every_kind_of_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    expected = write_every_kind(folder)
    assert read(folder, cache) == expected
    assert read(folder, cache, documents=5) == expected[:5]
    assert read(folder / "b.txt", cache) == ["two", "three", "four"]
    assert read(folder / "c.txt.xz", cache) == ["five\r\n", "six"]
    assert read(folder / "g.parquet", cache) == ["ten", "eleven"]
    # Documents longer than what is read or encoded at once.
    monkeypatch.setattr("rankfold.lab.corpus._PIECE", 2)
    monkeypatch.setattr("rankfold.lab.tokens._CHUNK", 3)
    assert read(folder, tmp_path / "other cache") == expected


def test_the_standard_library(cache: Path) -> None:
    corpus = prepare(DataConfig(), cache)
    sizes = int(corpus.training.lengths.sum() + corpus.validation.lengths.sum())
    assert 3e6 < sizes <= 6e6
    assert any("import" in text for text in texts(corpus.training))
    assert len(ValidationCycle(corpus.validation, DataConfig(), corpus.end_of_text)) > 1


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hf:some/set", ("some/set", None)),
        ("hf:some/set:part", ("some/set", "part")),
        ("fineweb", ("HuggingFaceFW/fineweb", "sample-10BT")),
    ],
)
def test_streams(
    name: str, asked: tuple[str, str | None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def load_dataset(*names: str, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        calls.append((names, split, streaming))
        return ({"text": f"document {i}", "url": ""} for i in range(1000))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read(name, cache, documents=3) == [f"document {i}" for i in range(3)]
    assert calls == [(asked, "train", True)]
    monkeypatch.setattr("rankfold.lab.corpus._STREAMED_DOCUMENTS", 5)
    assert len(read(name, cache)) == 5


def test_errors_of_streams(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*names: str, **options: Any) -> None:
        raise ConnectionError("no network")

    def textless(*names: str, **options: Any) -> list[dict[str, str]]:
        return [{"content": "x"}]

    for load, message in (
        (unreachable, "cannot stream hf:some/set: no network"),
        (textless, "cannot stream hf:some/set: a document has no text under 'text'"),
    ):
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
        with pytest.raises(DataError, match=message):
            read("hf:some/set", cache)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs datasets: pip install 'rankfold\[hub\]'"):
        read("hf:some/set", cache)
    assert not list(cache.iterdir())


def test_errors_of_files(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lzma.open(tmp_path / "whole.xz", "wb") as file:
        file.write(os.urandom(1000).hex().encode())
    contents = {
        "latin.txt": (b"\xe9t\xe9", "cannot read .*latin.txt: 'utf-8' codec"),
        "latin.md": (b"\xe9t\xe9", "cannot read .*latin.md: 'utf-8' codec"),
        "not.txt.xz": (b"plain", "cannot read .*not.txt.xz: "),
        "cut.txt.xz": ((tmp_path / "whole.xz").read_bytes()[:500], "cannot read .*cut.txt.xz: "),
        "bad.jsonl": (b'{"text": ', "cannot read .*bad.jsonl: Expecting value"),
        "field.jsonl": (b'{"body": "x"}', "field.jsonl: a document has no text under 'text'"),
        "list.jsonl": (b"[1]", "list.jsonl: a document has no text under 'text'"),
        "number.jsonl": (b'{"text": 1}', "number.jsonl: a document has no text under 'text'"),
        "bad.parquet": (b"PAR", "cannot read .*bad.parquet: "),
        "empty.txt": (b"\0\0", "empty.txt has no text in it: give another source"),
        "a.pdf": (b"x", "a.pdf is of no known kind; there are .txt, .txt.xz, .md, .py, .jsonl, .p"),
    }
    for name, (content, message) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(tmp_path / name, cache)
    write_parquet(tmp_path / "a.parquet", {"body": ["x"]})
    with pytest.raises(DataError, match=r"cannot read .*a.parquet: it has no column 'text'"):
        read(tmp_path / "a.parquet", cache)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'rankfold\[lab\]'"):
        read(tmp_path / "a.parquet", cache)
    with pytest.raises(
        DataError, match=r"there is no source '.*nowhere': give 'python', 'fineweb'"
    ):
        read(tmp_path / "nowhere", cache)
    (tmp_path / "bare").mkdir()
    with pytest.raises(
        DataError, match=r"the folder .*bare has no file of a known kind; there are"
    ):
        read(tmp_path / "bare", cache)
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"context": 1}, "context must be at least 2, got 1"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"documents": -1}, "documents must be at least 0, got -1"),
        ({"validation_share": 1.0}, r"validation_share must be in \(0, 1\), got 1.0"),
        ({"validation_share": 0.0}, r"validation_share must be in \(0, 1\), got 0.0"),
    ],
)
def test_errors_of_the_config(option: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataConfig(**option)


# -- the split


def test_the_split_is_fixed_and_complete(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "a.txt"
    documents = [f"document {i}" for i in range(1000)]
    source.write_bytes("\0".join(documents).encode())
    corpus = prepare(DataConfig(str(source), validation_share=0.1), cache)
    held_out = texts(corpus.validation)
    assert sorted(texts(corpus.training) + held_out) == sorted(documents)
    golden = 0x9E3779B97F4A7C15
    assert held_out == [x for i, x in enumerate(documents) if i * golden % 2**64 < 0.1 * 2**64]
    assert len(held_out) == 100
    shorter = prepare(DataConfig(str(source), validation_share=0.1, documents=300), cache)
    assert texts(shorter.validation) == held_out[:30]


def test_one_document_cannot_be_split(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("alone")
    with pytest.raises(DataError, match=r"of 1 documents .* give a validation .* a NUL byte parts"):
        prepare(DataConfig(str(tmp_path / "a.txt")), cache)
