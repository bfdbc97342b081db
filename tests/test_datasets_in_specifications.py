"""Data sets of specifications, and the lengths that a run keeps."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from builders import data as made_data
from builders.dataset_files import ROWS, SHORT, lengths_of
from builders.runs import ONE_CELL, spec_of

from orchestrator.run_folder.run_folder import open_run
from orchestrator.spec.job import Job
from orchestrator.spec.spec_file import SpecError
from orchestrator.storage.run_storage import StoreError

pytest_plugins = ["builders.dataset_counting"]


def spec_with(workload: str) -> str:
    """A specification with its workload on separate lines."""
    return ONE_CELL.replace("workload: {examples: 1000, epochs: 3}", f"workload:\n{workload}")


@pytest.fixture
def data_spec(
    count: Callable[..., Job],
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A specification with a data set in the working directory."""
    del count  # its child counts
    monkeypatch.chdir(tmp_path)
    made_data.write_jsonl(tmp_path / "data.jsonl", SHORT)
    lines = ("dataset: data.jsonl", "text_fields: [question, answer]")
    lines = (*lines, f"tokenizer: {tokenizer_folder}", "epochs: 3", "padding: grouped")
    return spec_with("".join(f"  {line}\n" for line in lines))


def test_a_specification_names_its_data_set(data_spec: str) -> None:
    """A data set of the paper or a histogram can be named as well."""
    workload = spec_of(data_spec).workload
    assert (workload.examples, workload.epochs, workload.padding) == (len(SHORT), 3, "grouped")
    assert lengths_of(workload).source == "data.jsonl"
    named = spec_of(spec_with("  {named: math_14k, epochs: 10, cutoff: 512}\n")).workload
    assert (named.examples, named.cutoff) == (13_921, 512)
    Path("l.csv").write_text("tokens,examples\n8,3\n", encoding="utf-8")
    text = spec_with("  {examples: 50, length_histogram: l.csv, epochs: 1}\n")
    assert lengths_of(spec_of(text).workload).histogram == ((8, 3),)


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (
            "answer]",
            "anser]",
            ["9: workload.text_fields: 'anser': no such field in data.jsonl: did"],
        ),
        ("data.jsonl", "date.jsonl", ["8: workload.dataset: date.jsonl: no such file or folder"]),
        ("dataset: ", "datset: ", ["8: workload.datset: unknown key: did you mean 'dataset'?"]),
        (
            "padding: grouped",
            "padding: gruped",
            ["12: workload.padding: must be 'longest', 'group"],
        ),
        ("padding: grouped", "named: gsm8k", ["12: workload.named: 'gsm8k': dataset is given as "]),
        ("padding: grouped", "padding: packed", ["7: workload.cutoff: is missing: packing needs "]),
        (
            "  tokenizer:",
            "  split: x\n  cutoff: 0 #",
            ["11: workload.cutoff: must be at least 1"],
        ),
        (
            "  tokenizer:",
            "  most: 3 #",
            ["7: workload.tokenizer: is missing: llama-tiny has no "],
        ),
        (
            "dataset: data.jsonl",
            "examples: 3",
            ["9: workload.text_fi", "10: workload.tokenizer", "12: workload.padding: 'grouped'"],
        ),
        ("models: [llama-tiny]", "models: [lama-tiny]", ["4: cells[0].models[0]: unknown model"]),
    ],
)
def test_mistakes_of_a_specifications_data_have_their_lines(
    old: str, new: str, lines: Sequence[str], data_spec: str
) -> None:
    """They are reported together with the file's other mistakes."""
    assert data_spec.count(old) == 1
    with pytest.raises(SpecError) as error:
        spec_of(data_spec.replace(old, new).replace("gpus: [cpu]", "gpus: [gpu]"))
    gpu, *mistakes = str(error.value).split("\n")
    assert gpu.startswith("made.yaml:2: gpus[0]: ")
    assert len(mistakes) == len(lines), mistakes
    for line, begin in zip(mistakes, lines, strict=True):
        assert line.startswith(f"made.yaml:{begin}"), line


def test_a_run_keeps_the_counted_lengths_when_its_data_set_is_gone(
    data_spec: str, tmp_path: Path
) -> None:
    """Another data set belongs to another sweep."""
    spec = spec_of(data_spec)
    run = open_run(tmp_path / "run", data_spec, spec)
    data = tmp_path / "data.jsonl"
    data.unlink()
    assert run.spec().workload == spec.workload
    made_data.write_jsonl(data, ROWS)
    with pytest.raises(StoreError, match=r"is another sweep's run \(workload differ\)"):
        open_run(tmp_path / "run", data_spec, spec_of(data_spec))
    made_data.write_jsonl(data, SHORT)
    assert open_run(tmp_path / "run", data_spec, spec_of(data_spec)).spec() == spec
    (tmp_path / "run" / "lengths.json").write_text("{}", encoding="utf-8")
    with pytest.raises(StoreError, match="not lengths of examples"):
        run.spec()


@pytest.mark.parametrize(
    "workload", ["{examples: 1000, epochs: 3}", "{named: openorca, epochs: 3}"]
)
def test_a_run_without_lengths_keeps_none(workload: str, tmp_path: Path) -> None:
    """Its folder has no file of lengths."""
    text = spec_with(f"  {workload}\n")
    run = open_run(tmp_path / "run", text, spec_of(text))
    assert sorted(path.name for path in run.path.iterdir()) == ["models.json", "sweep.yaml"]
    assert run.spec().workload.lengths is None
