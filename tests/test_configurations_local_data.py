"""Data files that a configuration names."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.main import main
from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.local_data import with_chat_template, with_local_data
from orchestrator.configurations.read_file import read_configuration
from orchestrator.datasets.source import DataError
from orchestrator.estimating.estimate_request import DEFAULT_JOB, EstimateRequest
from orchestrator.request import request_of
from orchestrator.spec.job_options import changed_job
from trials.records.model import presets

LOADED = 'load_dataset("json", data_files='
QWEN = presets()["qwen2.5-7b"]
AXOLOTL: dict[str, Any] = {"base_model": "a/b", "sequence_len": 1024}
LLAMA_FACTORY: dict[str, Any] = {"model_name_or_path": "a/b", "stage": "sft", "do_train": True}
TRL: dict[str, Any] = {"model_name_or_path": "a/b"}
MESSAGES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
JSON_DATA = [{"path": "json", "data_files": "data/train.jsonl"}]
PAIR_COLUMNS = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
INFO = {
    "mine": {"file_name": "chats.json"},
    "custom": {
        "file_name": "turns.json",
        "formatting": "sharegpt",
        "columns": {"messages": "turns"},
    },
    "of_the_hub": {"hf_hub_url": "owner/name"},
    "alpaca": {"file_name": "chats.json", "columns": {"query": "q", "prompt": "p", "system": "s"}},
    "pairs": {"file_name": "pairs.json", "ranking": True, "columns": PAIR_COLUMNS},
    "renamed": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": PAIR_COLUMNS | {"prompt": "question"},
    },
    "spoken": {"file_name": "chats.json", "ranking": True, "formatting": "sharegpt"},
    "liked": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"kto_tag": "label"}},
    "tools": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"tools": "tools"}},
    "sampled": {"file_name": "chats.json", "num_samples": 10},
    "history": {"file_name": "chats.json", "columns": {"prompt": "p", "history": "h"}},
}


def folder_with_data(folder: Path) -> Path:
    """A folder beside a folder with data files of several columns."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for name in ("chats.json", "train.jsonl"):
        (data / name).write_text(json.dumps(MESSAGES) + "\n", "utf-8")
    (data / "turns.json").write_text(json.dumps({"turns": MESSAGES["messages"]}) + "\n", "utf-8")
    pair = dict.fromkeys(("instruction", "input", "chosen", "rejected"), "a")
    (data / "pairs.json").write_text(json.dumps(pair) + "\n", "utf-8")
    (data / "dataset_info.json").write_text(json.dumps(INFO), "utf-8")
    return folder


def read(folder: Path, values: dict[str, Any]) -> Configuration:
    """Configuration beside data files."""
    (folder_with_data(folder) / "config.yml").write_text(yaml.safe_dump(values), "utf-8")
    return with_local_data(read_configuration(folder / "config.yml"))


def read_python(folder: Path, text: str) -> Configuration:
    """Python file that trains, beside data files."""
    trains = 'SFTTrainer(model="a/b", args=SFTConfig(), train_dataset=data)\n'
    (folder_with_data(folder) / "train.py").write_text(f"{text}\n{trains}", "utf-8")
    return with_local_data(read_configuration(folder / "train.py"))


def axolotl(**entry: object) -> dict[str, Any]:
    """Configuration of axolotl with one data set."""
    return AXOLOTL | {"datasets": [entry]}


@pytest.mark.parametrize(
    ("values", "file", "others"),
    [
        (axolotl(path="data/chats.json", type="chat_template"), "chats.json", {}),
        (axolotl(path="json", data_files="data/chats.json"), "chats.json", {}),
        (axolotl(path="json", data_files=["data/chats.json"]), "chats.json", {}),
        (axolotl(path="json", data_files={"train": "data/chats.json"}), "chats.json", {}),
        (axolotl(path="data/turns.json", field_messages="turns"), "turns.json", {"chat": "turns"}),
        (axolotl(path="data/turns.json", field="raw"), "turns.json", {"text_fields": ("raw",)}),
        (TRL | {"datasets": JSON_DATA}, "train.jsonl", {}),
        (LLAMA_FACTORY | {"dataset": "mine"}, "chats.json", {}),
        (LLAMA_FACTORY | {"dataset": "mine", "max_samples": 5}, "chats.json", {"most": 5}),
        (LLAMA_FACTORY | {"dataset": "custom"}, "turns.json", {"chat": "turns"}),
        (
            LLAMA_FACTORY | {"dataset": "alpaca"},
            "chats.json",
            {"text_fields": ("s", "p", "q")},
        ),
        (
            LLAMA_FACTORY | {"dataset": "alpaca", "stage": "pt"},
            "chats.json",
            {"text_fields": ("p", "q")},
        ),
        (LLAMA_FACTORY | {"dataset": "pairs", "stage": "dpo"}, "pairs.json", {}),
    ],
)
def test_a_local_file_is_the_data_of_the_estimate(
    tmp_path: Path, values: dict[str, Any], file: str, others: dict[str, Any]
) -> None:
    """Its name is relative to the configuration, and examples are cut at the stated length."""
    configuration = read(tmp_path, values)
    options, remarks = with_configuration(configuration, {})
    assert Path(options["dataset"]).resolve() == tmp_path / "data" / file
    assert others.items() <= options.items()
    assert options["cutoff"] == configuration.tokens
    assert not any("dataset" in remark for remark in remarks)


MIXED = [{"path": "data/turns.json", "field_messages": "turns"}, {"path": "data/chats.json"}]


@pytest.mark.parametrize(
    "values",
    [
        AXOLOTL | {"datasets": MIXED},
        LLAMA_FACTORY | {"dataset": "custom, mine", "max_samples": 2},
    ],
)
def test_all_local_files_are_the_data_of_the_estimate(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """Each by its own columns, and of LLaMA-Factory's only so many examples of each."""
    configuration = read(tmp_path, values)
    for name, turns in (
        ("chats.json", MESSAGES["messages"]),
        ("turns.json", 2 * MESSAGES["messages"]),
    ):
        field = "messages" if name == "chats.json" else "turns"
        line = json.dumps({field: turns}) + "\n"
        (tmp_path / "data" / name).write_text(3 * line, "utf-8")
    options, remarks = with_configuration(configuration, {})
    assert not any("dataset" in remark for remark in remarks)
    job = changed_job(DEFAULT_JOB, request_of(EstimateRequest, options).job, [QWEN])
    assert job.lengths is not None
    of_each = values.get("max_samples", 3)
    assert [count for _, count in job.lengths.histogram] == [of_each, of_each]
    assert job.examples == 2 * of_each
    assert "chats.json" in job.lengths.source
    assert "turns.json" in job.lengths.source
    given = request_of(EstimateRequest, options | {"examples": 7}).job
    assert changed_job(DEFAULT_JOB, given, [QWEN]).examples == 7


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        (
            'data = data.train_test_split(test_size=0.1, seed=1)\ndata = data["train"]',
            {"set_aside": 0.1},
        ),
        ('data = data.shuffle(1).train_test_split(50)["train"]', {"set_aside": 50}),
        ('halves = data.train_test_split()\ndata = halves["train"]', {"set_aside": 0.25}),
        ("MOST = 9\ndata = data.shuffle(seed=1).select(range(MOST))", {"most": 9}),
        (
            'data = data.select(range(9)).train_test_split(0.5)["train"]',
            {"most": 9, "set_aside": 0.5},
        ),
    ],
)
def test_a_part_of_a_file_that_a_python_file_takes_is_that_of_the_estimate(
    tmp_path: Path, changed: str, options: dict[str, Any]
) -> None:
    """The first examples, or those that no test set takes."""
    loaded = f'data = {LOADED}"data/train.jsonl", split="train")\n'
    read_options, _ = with_configuration(read_python(tmp_path, loaded + changed), {})
    assert Path(read_options["dataset"]).resolve() == tmp_path / "data" / "train.jsonl"
    assert {k: v for k, v in read_options.items() if k in ("most", "set_aside")} == options


def test_data_of_two_kinds_are_no_data_of_one_training(tmp_path: Path) -> None:
    """Pairs and texts have different losses."""
    values = AXOLOTL | {"datasets": [{"path": "data/chats.json"}, {"path": "data/pairs.json"}]}
    options, _ = with_configuration(read(tmp_path, values), {})
    with pytest.raises(DataError, match=r"pairs.json has pairs, and .*chats.json texts"):
        changed_job(DEFAULT_JOB, request_of(EstimateRequest, options).job, [QWEN])


@pytest.mark.parametrize(
    "text",
    [
        f'data = {LOADED}"data/train.jsonl", split="train")',
        f'PATH = "data/train.jsonl"\ndata = {LOADED}PATH)["train"]',
        f'both = {LOADED}dict(train="data/train.jsonl", test="b"))\ndata = both["train"]',
        f'data = {LOADED}"data/train.jsonl")["train"]\ndata = data.shuffle(seed=1)',
        f'if here:\n    data = {LOADED}"data/train.jsonl", split="train")',
    ],
)
def test_a_local_file_that_a_python_file_loads_is_the_data_of_the_estimate(
    tmp_path: Path, text: str
) -> None:
    """By literals, as all else of the file, in the split that it trains on."""
    options, remarks = with_configuration(read_python(tmp_path, text), {})
    assert Path(options["dataset"]).resolve() == tmp_path / "data" / "train.jsonl"
    assert not any("dataset" in remark for remark in remarks)
    if text.count("data =") == 1:  # below a function that trains, where its name has one value
        lines = (tmp_path / "train.py").read_text("utf-8").splitlines()
        (tmp_path / "train.py").write_text("\n".join([lines[-1], *lines[:-1]]), "utf-8")
        below = with_local_data(read_configuration(tmp_path / "train.py"))
        assert with_configuration(below, {})[0]["dataset"] == options["dataset"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('data = load_dataset("owner/name", split="train")', "not read"),
        ('data = load_dataset("owner/name", data_files="data/train.jsonl")', "of owner/name"),
        (f"data = {LOADED}args.file)", "args.file is computed"),
        (f'data = {LOADED}"data/train.jsonl", split="train").map(f)', "is computed"),
        (f'data = {LOADED}"data/train.jsonl")["test"]', "split test"),
        ("data = load(1)\ndata = data.map(f)", "data is computed"),
        ('data = data["train"]', "data is computed"),
        ("data = other\nother = data", "data is computed"),
        (f'data = {LOADED}"data/train.jsonl", split="train").train_test_split(0.1)', "computed"),
        (
            f'data = {LOADED}"data/train.jsonl", split="train").train_test_split(0.1)["test"]',
            "computed",
        ),
        (f'data = {LOADED}"data/train.jsonl", split="train").select(kept)', "computed"),
        (
            f'data = {LOADED}"data/train.jsonl")\nSFTTrainer(formatting_func=f)',
            "formatting_func is computed",
        ),
    ],
)
def test_other_data_of_a_python_file_is_not_read_and_a_line_says_so(
    tmp_path: Path, text: str, reason: str
) -> None:
    """The line names the option that gives the data."""
    options, remarks = with_configuration(read_python(tmp_path, text), {})
    assert options.get("dataset") is None
    (remark,) = (text for text in remarks if text.startswith("train_dataset: not read"))
    assert reason in remark
    assert "--dataset" in remark


@pytest.mark.parametrize(
    ("data", "file"),
    [
        ({"dataset_name": "data/train.jsonl"}, "data/train.jsonl"),
        ({"datasets": [{"path": "./data/train.jsonl"}]}, "./data/train.jsonl"),
    ],
)
def test_a_file_that_trl_does_not_find_by_its_name_is_read_with_a_remark(
    tmp_path: Path, data: dict[str, Any], file: str
) -> None:
    """``load_dataset`` looks for it on the hub; the form in the remark is read without one."""
    options, remarks = with_configuration(read(tmp_path, TRL | data), {})
    assert Path(options["dataset"]).resolve() == tmp_path / "data" / "train.jsonl"
    (remark,) = (text for text in remarks if "dataset" in text)
    form = yaml.safe_load(remark.partition("write datasets: ")[2])
    assert form == [{"path": "json", "data_files": file}]
    _, remarks = with_configuration(read_python(tmp_path, f'data = load_dataset("{file}")'), {})
    assert any(f'write {LOADED}"{file}")' in remark for remark in remarks)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (axolotl(path="owner/name"), "not read"),
        (axolotl(path="data/none.jsonl"), "data/none.jsonl: no such file"),
        (axolotl(path="data/notes.txt"), "unknown format '.txt'"),
        (axolotl(path="data/turns.json"), "columns"),
        (axolotl(path="data/chats.json", split="train[:10]"), "split"),
        (axolotl(path="data/chats.json", type={"format": "{instruction}"}), "--template"),
        (axolotl(path="data/chats.json", shards=10), "shards"),
        (
            TRL | {"datasets": [{"path": "data/chats.json"}, {"path": "a/b"}]},
            "1 of its 2 data sets",
        ),
        (
            LLAMA_FACTORY | {"dataset": "mine,custom", "mix_strategy": "interleave_under"},
            "interleave_under",
        ),
        (LLAMA_FACTORY | {"dataset": "sampled"}, "num_samples"),
        (LLAMA_FACTORY | {"dataset": "of_the_hub"}, "not read"),
        (LLAMA_FACTORY | {"dataset": "renamed"}, "ranking"),
        (LLAMA_FACTORY | {"dataset": "spoken"}, "ranking"),
        (LLAMA_FACTORY | {"dataset": "liked"}, "kto_tag"),
        (LLAMA_FACTORY | {"dataset": "tools"}, "tools"),
        (LLAMA_FACTORY | {"dataset": "history"}, "history"),
        (LLAMA_FACTORY | {"dataset": "mine", "dataset_dir": "none"}, "not read"),
    ],
)
def test_other_data_is_not_read_and_the_stated_length_is_an_upper_bound(
    tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    """A remark says why, and another that each row has the stated length."""
    (folder_with_data(tmp_path) / "data" / "notes.txt").touch()
    configuration = read(tmp_path, values)
    assert (configuration.data_fault is None) == ("no such file" not in reason)
    options, remarks = with_configuration(configuration, {})
    assert options.get("dataset") is None
    assert options["seq_len"] == configuration.tokens
    assert any(reason in remark for remark in remarks)
    assert any("upper bound" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (axolotl(path="data/none.jsonl"), "datasets: data/none.jsonl: no such file in "),
        (axolotl(path="data/empty.json"), "data/empty.json: holds no examples: correct it"),
        (
            LLAMA_FACTORY | {"dataset": "alpacca"},
            "has no data set 'alpacca': did you mean 'alpaca'",
        ),
    ],
)
def test_data_that_stops_the_trainer_stops_an_estimate_that_assumes_its_size(
    tmp_path: Path, values: dict[str, Any], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A price for an assumed number of examples would hide a wrong path."""
    (folder_with_data(tmp_path) / "data" / "empty.json").touch()
    read(tmp_path, values)
    priced = ["estimate", "--config", str(tmp_path / "config.yml"), "--gpu", "A40"]
    assert main(priced) == 1
    message = capsys.readouterr().err
    assert fault in message
    assert message.count("\n") == 1
    assert main([*priced, "--examples", "5", "--model", "none"]) == 1
    assert fault not in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"dataset": "b.jsonl"}, {"length_histogram": "l.csv"}])
def test_data_of_the_command_line_replaces_that_of_the_file(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """Options that read the file's data go with it."""
    values = LLAMA_FACTORY | {"dataset": "custom", "max_samples": 5}
    options, _ = with_configuration(read(tmp_path, values), given)
    assert not options.keys() & ({"dataset", "chat", "most"} - given.keys())
    assert given.items() <= options.items()


def test_a_length_of_the_command_line_cuts_the_examples(tmp_path: Path) -> None:
    """``--seq-len`` replaces the stated length, data or not."""
    configuration = read(tmp_path, axolotl(path="data/chats.json"))
    options, _ = with_configuration(configuration, {"seq_len": 512})
    assert (options["seq_len"], options["cutoff"]) == (512, 512)


@pytest.mark.parametrize(
    ("settings", "values", "lacks"),
    [
        ({}, {}, True),
        ({}, {"chat_template": "tokenizer_default"}, True),
        ({}, {"chat_template": "chatml"}, False),
        ({}, {"chat_template": "tokenizer_default_fallback_chatml"}, False),
        ({}, {"chat_template_jinja": "t"}, False),
        ({"chat_template": "t"}, {}, False),
        ([], {}, False),
        (None, {}, False),
    ],
)
def test_a_tokenizer_without_the_chat_template_that_axolotl_needs_is_said(
    tmp_path: Path, settings: object, values: dict[str, Any], *, lacks: bool
) -> None:
    """Axolotl stops before it trains then; the line has the key that mends it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", "utf-8")
    if settings is not None:
        (model / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    data = axolotl(path="data/chats.json", type="chat_template")
    configuration = read(tmp_path, data | {"base_model": "./model"} | values)
    _, remarks = with_configuration(with_chat_template(configuration), {})
    assert any("stops before it trains: add chat_template" in text for text in remarks) == lacks
    (model / "chat_template.jinja").write_text("t", "utf-8")
    assert with_chat_template(configuration) == configuration


def test_a_folder_beside_the_configuration_is_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its data is; a name that no folder there has stays as it is."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", "utf-8")
    for name, model in (("./model", str(tmp_path / "model")), ("a/b", "a/b")):
        configuration = read(tmp_path, AXOLOTL | {"base_model": name})
        assert with_configuration(configuration, {})[0]["model"] == model
        assert with_configuration(configuration, {"model": "c/d"})[0]["model"] == "c/d"
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "config.yml").write_text(yaml.safe_dump(AXOLOTL | {"base_model": "model"}), "utf-8")
    assert read_configuration(Path(tmp_path.name, "config.yml")).model == f"./{tmp_path.name}/model"
