"""Batches, against plain loops that are written apart from the loader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankfold.lab.corpus import SHUFFLES, DataConfig, prepare
from rankfold.lab.loader import Loader, ValidationCycle
from rankfold.lab.tokens import DataError, Tokens, scrambled

END = 256
BITS = (1 << 64) - 1


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def store(lengths: list[int], seed: int = 0) -> Tokens:
    draw = np.random.default_rng(seed)
    values = draw.integers(0, 256, sum(lengths)).astype(np.uint16)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return Tokens(values, offsets, np.arange(len(lengths)))


def by_sample(batch: int, context: int) -> DataConfig:
    return DataConfig(batch=batch, context=context, shuffle="samples")


def random_store(documents: int = 40, longest: int = 60) -> Tokens:
    return store(np.random.default_rng(5).integers(0, longest, documents).tolist())


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


def plain_samples(tokens: Tokens, seed: int, epoch: int, batch: int, context: int) -> Any:
    """All batches of one pass over shuffled samples."""
    stream: list[int] = []
    for document in plain_order(len(tokens), seed, epoch):
        stream += [END, *tokens[document].tolist()]
    samples = [stream[i : i + context] for i in range(0, len(stream) - context + 1, context)]
    start = plain_mix((plain_mix((plain_mix(seed & BITS) + epoch) & BITS) + 1) & BITS)
    keys = [plain_mix((start + i * 0x9E3779B97F4A7C15) & BITS) for i in range(len(samples))]
    mixed = [samples[i] for i in sorted(range(len(samples)), key=lambda i: keys[i])]
    return [mixed[i : i + batch] for i in range(0, len(mixed) - batch + 1, batch)]


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


@pytest.mark.parametrize("seed", [0, 12345])
@pytest.mark.parametrize(("batch", "context"), [(1, 2), (2, 16), (3, 50), (4, 100)])
def test_shuffled_samples_are_those_of_the_plain_loop(seed: int, batch: int, context: int) -> None:
    tokens = random_store()
    loader = Loader(tokens, by_sample(batch, context), END, seed)
    for epoch in range(4):
        for number, samples in enumerate(plain_samples(tokens, seed, epoch, batch, context), 1):
            got = loader.next()
            assert got.dtype == np.int64
            assert got.tolist() == samples
            assert loader.state_dict() == {"epoch": epoch, "position": number * batch}


def test_a_pass_over_samples_has_every_number_once() -> None:
    # Documents of different numbers, one of them none, and as many as fill the batches.
    lengths = [7, 0, 29, 1, 13]
    offsets = np.cumsum([0, *lengths])
    tokens = Tokens(np.arange(50, dtype=np.uint16) + END + 1, offsets, np.arange(5))
    loader = Loader(tokens, by_sample(batch=1, context=11), END, seed=0)
    passes = [np.concatenate([loader.next().ravel() for _ in range(5)]) for _ in range(20)]
    for seen in passes:
        assert sorted(seen.tolist()) == [END] * 5 + list(range(END + 1, END + 51))
    assert loader.state_dict()["epoch"] == 19
    assert len({tuple(seen.tolist()) for seen in passes}) == 20


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


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_continuing_from_any_state(shuffle: str) -> None:
    tokens, config = random_store(), DataConfig(batch=3, context=50, shuffle=shuffle)
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


def test_a_state_of_another_corpus_of_samples() -> None:
    loader = Loader(store([99]), by_sample(batch=2, context=16), END, seed=0)
    loader.load_state_dict({"epoch": 3, "position": 6})
    with pytest.raises(DataError, match="is of another corpus: this one has 6 training samples"):
        loader.load_state_dict({"epoch": 0, "position": 7})


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


@pytest.mark.parametrize(
    ("documents", "words"), [(1, "there is but 1 document"), (3, "there are but 3 documents")]
)
def test_a_long_text_of_few_documents_warns(documents: int, words: str) -> None:
    config, tokens = DataConfig(batch=2, context=4), store([1000] * documents)
    with pytest.warns(UserWarning, match=f"at most 0.8% of these .* {words};"):
        Loader(tokens, config, END, seed=0)


def test_nothing_is_lost_of_a_long_text_by_samples() -> None:
    loader = Loader(store([1000]), by_sample(batch=2, context=4), END, seed=0)
    first = {tuple(loader.next().ravel().tolist()) for _ in range(125)}
    assert loader.state_dict() == {"epoch": 0, "position": 250}
    assert len(first) == 125


def test_what_can_be_shuffled() -> None:
    with pytest.raises(DataError, match="shuffle is one of documents, samples, not 'tokens'"):
        DataConfig(shuffle="tokens")


@pytest.mark.parametrize("lengths", [[70], [1000] * 32, [0] * 20])
def test_other_texts_do_not(lengths: list[int]) -> None:
    Loader(store(lengths), DataConfig(batch=2, context=4), END, seed=0)


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
