"""The cache of tokens: what is kept, found again, and shared by processes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankfold.lab import tokens as tokens_module
from rankfold.lab.corpus import Corpus, DataConfig, prepare
from rankfold.lab.tokens import ByteTokenizer

from .lab_texts import read, texts


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def never_tokenize(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ByteTokenizer, texts: list[str]) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(ByteTokenizer, "encode", fail)


def test_tokens_are_mapped_and_small(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\0de")
    corpus = prepare(DataConfig(str(tmp_path / "a.txt")), cache)
    assert isinstance(corpus, Corpus)
    assert corpus.training.values.dtype == np.uint16
    assert corpus.training.values.tolist() == [97, 98, 99, 100, 101]
    assert corpus.training.offsets.tolist() == [0, 3, 5]
    assert isinstance(corpus.training.values.base, np.memmap)
    assert not corpus.training.values.flags.writeable


def test_large_vocabularies_get_wider_tokens(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: ByteTokenizer, texts: list[str]) -> list[Any]:
        return [np.array([70_000]) for _ in texts]

    monkeypatch.setattr(ByteTokenizer, "vocabulary", 80_000)
    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    (tmp_path / "a.txt").write_bytes(b"abc\0de")
    corpus = prepare(DataConfig(str(tmp_path / "a.txt")), cache)
    assert corpus.training.values.dtype == np.uint32
    assert corpus.training[0].tolist() == [70_000]


def test_a_hit_does_not_tokenize_and_a_change_does(
    tmp_path: Path, cache: Path, request: pytest.FixtureRequest
) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"abc\0de")
    config = DataConfig(str(source))
    first = prepare(config, cache)
    request.getfixturevalue("never_tokenize")
    again = prepare(DataConfig(str(source), context=7, batch=3, validation_share=0.4), cache)
    assert texts(again.training) == texts(first.training)
    os.utime(source, ns=(1, 1))
    with pytest.raises(AssertionError, match="tokenized again"):
        prepare(config, cache)
    assert [path.name[0] == "." for path in cache.iterdir()] == [False]


def test_a_changed_file_is_read_anew(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    assert read(folder, cache) == ["a"]
    (folder / "a.txt").write_text("other")
    assert read(folder, cache) == ["other"]
    (folder / "b.txt").write_text("b")
    assert read(folder, cache) == ["other", "b"]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\0de")
    config = DataConfig(str(tmp_path / "a.txt"))
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "named"))
    prepare(config)
    assert len(list((tmp_path / "named").iterdir())) == 1
    monkeypatch.delenv("RANKFOLD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare(config)
    assert len(list((tmp_path / ".cache" / "rankfold" / "tokens").iterdir())) == 1


def test_leavings_of_a_killed_run_are_harmless(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\0de")
    assert read(tmp_path / "a.txt", cache) == ["abc", "de"]
    (finished,) = cache.iterdir()
    finished.rename(cache / f".{finished.name}-0123")
    (cache / f".{finished.name}-0123" / "offsets.npy").unlink()
    assert read(tmp_path / "a.txt", cache) == ["abc", "de"]


def prepare_together(source: str, cache: Path, barrier: Any, results: Any) -> None:
    publish = tokens_module._publish

    def publish_together(partial: Path, folder: Path) -> None:
        barrier.wait(60)
        publish(partial, folder)

    tokens_module._publish = publish_together
    results.put(texts(prepare(DataConfig(source), cache).training))


def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\0de")
    processes = multiprocessing.get_context("spawn")
    barrier, results = processes.Barrier(2), processes.Queue()
    arguments = (str(tmp_path / "a.txt"), cache, barrier, results)
    workers = [processes.Process(target=prepare_together, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=60) for _ in workers] == [["de"], ["de"]]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert [path.name[0] == "." for path in cache.iterdir()] == [False]


def test_an_unwritable_place_is_reported(tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    partial.mkdir()
    with pytest.raises(FileNotFoundError):
        tokens_module._publish(partial, tmp_path / "missing" / "folder")


def test_progress(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr("rankfold.lab.tokens._CHUNK", 5)
    (tmp_path / "a.txt").write_bytes(b"abc\0de\0f")
    (tmp_path / "files").mkdir()
    for name in ("a.md", "b.md", "c.py"):
        (tmp_path / "files" / name).write_text("12345")
    config = DataConfig(str(tmp_path / "a.txt"), str(tmp_path / "files"))
    prepare(config, cache, lambda *news: seen.append(news))
    label = "tokenizing files"
    assert seen[:2] == [("tokenizing a.txt", 2, 0), ("tokenizing a.txt", 3, 0)]
    assert seen[2:] == [(label, 1, 3), (label, 2, 3), (label, 3, 3)]
    prepare(config, cache, lambda *news: pytest.fail("nothing is tokenized"))
