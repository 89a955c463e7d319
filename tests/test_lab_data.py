"""The laboratory's data: tokenizers, sources, the cache of tokens, and batches."""

from __future__ import annotations

import base64
import json
import lzma
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rankfold.lab import tokens as tokens_module
from rankfold.lab.corpus import Corpus, DataConfig, prepare
from rankfold.lab.loader import Loader, ValidationCycle
from rankfold.lab.tokens import ByteTokenizer, DataError, Tokens, make_tokenizer, scrambled

END = 256
BITS = (1 << 64) - 1


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def never_tokenize(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ByteTokenizer, texts: list[str]) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(ByteTokenizer, "encode", fail)


def store(lengths: list[int], seed: int = 0) -> Tokens:
    draw = np.random.default_rng(seed)
    values = draw.integers(0, 256, sum(lengths)).astype(np.uint16)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return Tokens(values, offsets, np.arange(len(lengths)))


def random_store(documents: int = 40, longest: int = 60) -> Tokens:
    return store(np.random.default_rng(5).integers(0, longest, documents).tolist())


def texts(tokens: Tokens) -> list[str]:
    return [bytes(tokens[i].tolist()).decode("utf8") for i in range(len(tokens))]


def read(source: Path | str, cache: Path, **options: Any) -> list[str]:
    """All documents of a source, in order, by way of the second source of a corpus."""
    config = DataConfig(source=str(source), validation=str(source), **options)
    corpus = prepare(config, cache)
    assert texts(corpus.training) == texts(corpus.validation)
    return texts(corpus.training)


# -- plain-Python statements of what the loader does, written apart from it


def plain_mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & BITS
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & BITS
    return state ^ (state >> 31)


def plain_order(documents: int, seed: int, epoch: int) -> list[int]:
    start = plain_mix((plain_mix(seed & BITS) + epoch) & BITS)
    keys = [plain_mix((start + i * 0x9E3779B97F4A7C15) & BITS) for i in range(documents)]
    return sorted(range(documents), key=lambda i: keys[i])


def plain_pass(tokens: Tokens, order: list[int], batch: int, context: int) -> Iterator[Any]:
    """Batches of one pass, and how many documents were used when each was complete."""
    samples: list[list[int]] = []
    sample: list[int] = []
    for used, document in enumerate(order, start=1):
        for token in [END, *tokens[document].tolist()]:
            sample.append(token)
            if len(sample) == context:
                samples.append(sample)
                sample = []
            if len(samples) == batch:
                yield samples, used
                samples, sample = [], []
                break


def plain_batches(tokens: Tokens, seed: int, batch: int, context: int) -> Iterator[Any]:
    epoch = 0
    while True:
        order = plain_order(len(tokens), seed, epoch)
        for samples, used in plain_pass(tokens, order, batch, context):
            yield samples, {"epoch": epoch, "position": used}
        epoch += 1


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
    with pytest.raises(DataError, match=r"give the path of a gpt2.tiktoken file as ranks \(no net"):
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
    with pytest.raises(DataError, match=r"needs datasets: pip install 'rankfold\[lab\]'"):
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
    with pytest.raises(DataError, match=r"0.02 of 1 documents .* none to train on: give a valid"):
        prepare(DataConfig(str(tmp_path / "a.txt")), cache)


# -- the cache


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


# -- batches


def test_the_scramble_is_splitmix() -> None:
    # The first output of splitmix64 from state 0, as published with it.
    assert int(scrambled(1)[0]) == 0xE220A8397B1DCDAF
    for seed, epoch in ((0, 0), (3, 1), (-1, 2), (2**70 + 1, 0)):
        keys = scrambled(50, seed, epoch)
        assert np.argsort(keys, kind="stable").tolist() == plain_order(50, seed, epoch)


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize(("batch", "context"), [(1, 2), (2, 16), (3, 50), (4, 100)])
def test_batches_are_those_of_the_plain_loop(seed: int, batch: int, context: int) -> None:
    tokens = random_store()
    loader = Loader(tokens, DataConfig(batch=batch, context=context), END, seed)
    assert loader.state_dict() == {"epoch": 0, "position": 0}
    for samples, state in plain_batches(tokens, seed, batch, context):
        got = loader.next()
        assert got.dtype == np.int64
        assert got.shape == (batch, context)
        assert got.tolist() == samples
        assert loader.state_dict() == state
        if state["epoch"] == 4:
            break


def test_a_batch_by_hand() -> None:
    tokens = Tokens(np.arange(9, dtype=np.uint16), np.array([0, 3, 9]), np.arange(2))
    cycle = ValidationCycle(tokens, DataConfig(batch=2, context=3), END)
    assert cycle.batch(0).tolist() == [[END, 0, 1], [2, END, 3]]
    assert len(cycle) == 1
    # A document that ends with the batch leaves no remainder: the next one is used in full.
    tokens = Tokens(np.arange(6, dtype=np.uint16), np.array([0, 3, 6]), np.arange(2))
    cycle = ValidationCycle(tokens, DataConfig(batch=2, context=2), END)
    assert [cycle.batch(i).tolist() for i in range(2)] == [[[END, 0], [1, 2]], [[END, 3], [4, 5]]]


def test_no_batch_spans_epochs() -> None:
    # Documents of one number each: two batches of three documents, and the seventh is dropped.
    tokens = Tokens(np.arange(7, dtype=np.uint16), np.arange(8), np.arange(7))
    loader = Loader(tokens, DataConfig(batch=1, context=6), END, seed=0)
    orders = []
    for epoch in range(20):
        batches = [loader.next()[0, 1::2].tolist() for _ in range(2)]
        assert loader.state_dict() == {"epoch": epoch, "position": 6}
        orders.append(batches[0] + batches[1])
        assert len(set(orders[-1])) == 6
    assert len({tuple(order) for order in orders}) > 15


def test_seeds_give_different_orders() -> None:
    config = DataConfig(batch=2, context=16)
    first, second = (Loader(random_store(), config, END, seed).next() for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_continuing_from_any_state() -> None:
    tokens, config = random_store(), DataConfig(batch=3, context=50)
    loader = Loader(tokens, config, END, seed=7)
    states, batches = [], []
    for _ in range(40):
        states.append(json.loads(json.dumps(loader.state_dict())))
        batches.append(loader.next())
    assert states[-1]["epoch"] > 3
    for number, state in enumerate(states):
        other = Loader(tokens, config, END, seed=7)
        other.next()
        other.load_state_dict(state)
        assert other.state_dict() == state
        for expected in batches[number : number + 10]:
            assert np.array_equal(other.next(), expected)


@pytest.mark.parametrize("state", [(0, 41), (0, -1), (-1, 0)])
def test_a_state_of_another_corpus(state: tuple[int, int]) -> None:
    loader = Loader(random_store(), DataConfig(batch=2, context=16), END, seed=0)
    with pytest.raises(DataError, match="is of another corpus: this one has 40 training documents"):
        loader.load_state_dict({"epoch": state[0], "position": state[1]})


def test_validation_is_one_plain_pass_in_order() -> None:
    tokens, config = random_store(), DataConfig(batch=3, context=50)
    cycle = ValidationCycle(tokens, config, END)
    expected = [samples for samples, _ in plain_pass(tokens, list(range(40)), 3, 50)]
    assert len(cycle) == len(expected) > 2
    for number in range(-1, 2 * len(cycle) + 1):
        assert cycle.batch(number).tolist() == expected[number % len(expected)]
    cycle.batch(0)[:] = 0
    assert cycle.batch(0).tolist() == expected[0]


def test_batches_of_a_split_corpus(tmp_path: Path, cache: Path) -> None:
    documents = [f"document {i} " * (i % 9) for i in range(200)]
    (tmp_path / "a.txt").write_bytes("\0".join(documents).encode())
    config = DataConfig(str(tmp_path / "a.txt"), validation_share=0.2, batch=2, context=20)
    corpus = prepare(config, cache)
    for tokens in (corpus.training, corpus.validation):
        loader = Loader(tokens, config, corpus.end_of_text, seed=3)
        for (samples, _), _ in zip(plain_batches(tokens, 3, 2, 20), range(100), strict=False):
            assert loader.next().tolist() == samples


def test_too_little_text_for_a_batch() -> None:
    tokens = store([5, 6])
    for which, make in (
        ("training", lambda c: Loader(tokens, c, END, 0)),
        ("validation", lambda c: ValidationCycle(tokens, c, END)),
    ):
        assert make(DataConfig(batch=1, context=13))
        message = f"the {which} documents have 13 tokens and one batch of 2 x 7 needs 14: give more"
        with pytest.raises(ValueError, match=message):
            make(DataConfig(batch=2, context=7))
