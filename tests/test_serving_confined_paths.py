"""Files that a server may read: those inside one folder, symbolic links followed."""

from pathlib import Path

import pytest

from orchestrator.serving.confined_paths import OutsideError, check_confined


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with files, beside a secret and links to it."""
    folder = tmp_path / "root"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.jsonl").write_text("{}")
    (folder / "model").mkdir()
    (folder / "linked").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "b.jsonl").write_text("{}")
    (folder / "linked" / "b.jsonl").symlink_to(tmp_path / "secret" / "b.jsonl")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "inner.jsonl").symlink_to(folder / "data" / "a.jsonl")
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": "data/a.jsonl", "model": "llama-3.1-8b"},
        {"dataset": "inner.jsonl"},
        {"dataset": "data"},
        {"dataset": "OWNER/NAME", "tokenizer": "meta-llama/Llama-3.1-8B", "model": "./model"},
        {"run": "runs/none", "prices": "paper"},
        {"prices": ("shipped", "data/a.jsonl"), "constants": None},
        {"gpu": "../A40"},
    ],
)
def test_paths_inside_and_names_are_allowed(options: dict[str, object], root: Path) -> None:
    """A path need not exist; names of presets, of the hub and of price tables are no paths."""
    check_confined(options, root)


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": "../secret/b.jsonl"},
        {"dataset": "data/../../secret/b.jsonl"},
        {"dataset": "out/b.jsonl"},
        {"dataset": "linked"},
        {"dataset": "linked/b.jsonl"},
        {"model": "out"},
        {"model": "/etc"},
        {"model": "~/model"},
        {"tokenizer": "../secret"},
        {"run": "../run"},
        {"run": "s3://bucket/run"},
        {"catalog": "/etc/passwd"},
        {"constants": "../secret/none.json"},
        {"length_histogram": "out/none.csv"},
        {"learned": "/usr"},
        {"prices": "shipped,../mine.csv"},
        {"prices": ["/etc/passwd"]},
    ],
)
def test_paths_outside_are_refused(options: dict[str, object], root: Path) -> None:
    """By ``..``, an absolute path, a home folder, a symbolic link, or a link below a folder."""
    with pytest.raises(OutsideError, match=next(iter(options))):
        check_confined(options, root)
