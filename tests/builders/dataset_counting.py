"""Fixtures of tests that read and count a data set with a trained tokenizer.

A test module that needs them has ``pytest_plugins = ["builders.dataset_counting"]``.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from builders import data as made_data
from builders.dataset_files import ROWS, joined
from orchestrator.datasets import lengths as data_lengths
from orchestrator.spec.job import Job
from orchestrator.spec.job_request import JobRequest, requested_job
from trials.child_process.token_counter import TokenCounter


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trained tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    made_data.train_tokenizer(folder, [joined(row) for row in ROWS])
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    """The trained tokenizer as the tokenizers library loads it, without truncation or padding."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture(scope="session")
def one_child(tokenizer_folder: Path) -> Iterator[TokenCounter]:
    """A counter whose child all tests share: a process takes seconds to import."""
    with TokenCounter(str(tokenizer_folder)) as counter:
        yield counter


class SharedCounter:
    """A counter that uses the shared child for the shared tokenizer, else its own."""

    def __init__(self, name: str, shared: TokenCounter, folder: Path) -> None:
        self._counter = shared if name == str(folder) else TokenCounter(name)
        self._own = self._counter is not shared

    def __enter__(self) -> TokenCounter:
        return self._counter.__enter__() if self._own else self._counter

    def __exit__(self, *exception: object) -> None:
        if self._own:
            self._counter.__exit__(*exception)


@pytest.fixture
def count(
    one_child: TokenCounter, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Job]:
    """Function that reads and counts a data set with the trained tokenizer."""
    monkeypatch.setattr(
        data_lengths,
        "TokenCounter",
        lambda name: SharedCounter(name, one_child, tokenizer_folder),
    )

    def counted(dataset: Path | str, **options: Any) -> Job:
        fields = {
            "tokenizer": str(tokenizer_folder),
            "epochs": 3,
            "dataset": str(dataset),
        } | options
        return requested_job(JobRequest.model_validate(fields), ())

    return counted
