"""What a run finds in its folder when it is started again: a text, a checkpoint, a record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankfold.lab import records
from rankfold.lab.config import RunConfig
from rankfold.lab.training import Progress, train

from .lab_runs import run, small, write_corpus

CPU = torch.device("cpu")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKFOLD_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path)


def losses(found: records.Run) -> list[list[float]]:
    return [found.training.values, found.validation.values]


def begun(config: RunConfig, folder: Path) -> None:
    """A run that is interrupted at its 20th step, after a checkpoint."""

    def show(progress: Progress) -> None:
        if progress.step == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, folder, device=CPU, show=show)
    assert records.standing(folder) == "interrupted"


def rewrite(corpus: Path) -> None:
    corpus.write_text(corpus.read_text(encoding="utf-8").replace("fox", "cat"), encoding="utf-8")


def test_an_interrupted_run_does_not_go_on_with_another_text(corpus: Path, tmp_path: Path) -> None:
    config, folder = small(corpus), tmp_path / "run"
    text = corpus.read_text(encoding="utf-8")
    begun(config, folder)
    rewrite(corpus)
    with pytest.raises(ValueError, match=r"text of this run has changed .* or remove .*run"):
        run(config, folder)
    corpus.write_text(text, encoding="utf-8")  # the same text, whenever it was written
    assert run(config, folder).status == "finished"
    assert losses(run(config, tmp_path / "whole")) == losses(records.read_run(folder))


def test_a_finished_run_is_not_taken_for_one_of_another_text(corpus: Path, tmp_path: Path) -> None:
    config, folder = small(corpus, training__steps=10), tmp_path / "run"
    run(config, folder)
    rewrite(corpus)
    with pytest.raises(ValueError, match="text of this run has changed"):
        run(config, folder)
    assert records.status_of(folder) == "finished"
    corpus.unlink()  # with no text there is nothing that it could be mistaken for
    assert run(config, folder).status == "finished"


def test_runs_without_a_fingerprint_go_on(corpus: Path, tmp_path: Path) -> None:
    """As versions left them that did not take one."""
    config = small(corpus)
    run(config, tmp_path / "finished")
    begun(config, tmp_path / "begun")
    for name in ("finished", "begun"):
        (tmp_path / name / records.TEXT).unlink()
    rewrite(corpus)
    assert run(config, tmp_path / "finished").status == "finished"
    assert run(config, tmp_path / "begun").status == "finished"


def test_a_run_without_a_checkpoint_begins_anew_with_any_text(corpus: Path, tmp_path: Path) -> None:
    config, folder = small(corpus, training__checkpoint_every=500), tmp_path / "run"
    begun(config, folder)
    rewrite(corpus)
    assert run(config, folder).status == "finished"
    assert losses(run(config, tmp_path / "whole")) == losses(records.read_run(folder))


@pytest.mark.parametrize("size", [0, 1, 100, 4171])
def test_a_damaged_checkpoint_is_named(size: int, corpus: Path, tmp_path: Path) -> None:
    config, folder = small(corpus), tmp_path / "run"
    begun(config, folder)
    checkpoint = folder / records.CHECKPOINT
    checkpoint.write_bytes(checkpoint.read_bytes()[:size])
    with pytest.raises(
        ValueError, match=r"checkpoint\.pt: it is damaged; remove it, and the run be"
    ):
        run(config, folder)
    checkpoint.unlink()
    assert run(config, folder).status == "finished"


def test_a_run_that_is_being_made_is_not_interrupted(corpus: Path, tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", []
    assert records.standing(folder) == "new"
    train(
        small(corpus, training__steps=3),
        folder,
        device=CPU,
        show=lambda progress: seen.append(records.standing(folder)),
    )
    assert seen == ["running"]
    assert records.standing(folder) == "finished"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (records.CONFIG, ""),
        (records.CONFIG, '{"key": "a", "config": {}}'),
        (records.CONFIG, '{"key": "a", "config": []}'),
        (records.METRICS, '{"kind": "train"}\n'),
        (records.METRICS, "3\n"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(
    name: str, text: str, corpus: Path, tmp_path: Path
) -> None:
    for each in ("sound", "broken"):
        run(small(corpus, training__steps=3), tmp_path / each)
    (tmp_path / "broken" / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot read the record of the run in .*broken"):
        records.read_run(tmp_path / "broken")
    unreadable: list[Path] = []
    found = records.read_runs(tmp_path, unreadable.append)
    assert [each.folder.name for each in found] == ["sound"]
    assert unreadable == [tmp_path / "broken"]
