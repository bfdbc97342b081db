"""Files that a user names: each that cannot be read is one line."""

import os
import threading
import time
from pathlib import Path

import pytest

from gpu_catalog import user_file
from gpu_catalog.errors import UserError
from gpu_catalog.user_file import text_of
from orchestrator.cli.main import main

DEEP = "[" * 5000 + "]" * 5000
CONFIG = (
    '{"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, %s}'
)
ESTIMATE = ("estimate", "--seq-len", "24", "--gpu", "A40", "--model")
SWEEP = """\
name: a
gpus: [cpu]
cells: [{models: [llama-tiny], recipes: [{method: full}], seq_lens: [16]}]
workload: {examples: 8, epochs: 1}
"""


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "name", "content"),
    [
        (("catalog", "gpus", "--catalog", "a.toml"), "a.toml", f"a = {DEEP}"),
        (("catalog", "gpus", "--catalog", "/dev/zero"), None, None),
        (("estimate", "--config", "/dev/zero"), None, None),
        (("estimate", "--config", "a.yaml"), "a.yaml", f"base_model: {DEEP}"),
        ((*ESTIMATE, "./a.json"), "a.json", DEEP),
        ((*ESTIMATE, "./a.json"), "a.json", CONFIG % '"num_key_value_heads": 1.5'),
        ((*ESTIMATE, "./a.json"), "a.json", CONFIG % '"sliding_window": "a"'),
        ((*ESTIMATE, "llama-tiny", "--prices", "p" * 300), None, None),
        ((*ESTIMATE, "llama-tiny", "--length-histogram", "/dev/zero"), None, None),
        (("plan", "p" * 300), None, None),
        (("plan", "a.yaml"), "a.yaml", SWEEP.replace("method: full", "named: [full]")),
        (("plan", "a.yaml"), "a.yaml", SWEEP.replace("seq_lens", "weights: [random], seq_lens")),
        (("plan", "a.yaml"), "a.yaml", SWEEP.replace("[{method: full}]", DEEP)),
        (("plan", "a.yaml"), "a.yaml", SWEEP.replace("[16]", str(list(range(100_001))))),
    ],
)
def test_a_hostile_file_or_name_is_one_line(
    arguments: tuple[str, ...],
    name: str | None,
    content: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing starts, and no traceback is printed."""
    if name is not None and content is not None:
        Path(name).write_text(content, encoding="utf-8")
    assert main(arguments) in {1, 2}
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert len(output.err) < 600


def test_the_first_mistakes_are_printed_and_the_others_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The API's error has all of them."""
    file = tmp_path / "a.yaml"
    file.write_text(SWEEP.replace("[16]", f"[{', '.join('0' * 30)}]"), encoding="utf-8")
    assert main(["plan", str(file)]) == 1
    *first, last = capsys.readouterr().err.splitlines()
    assert len(first) == 20
    assert "39" in last


def test_the_text_of_a_file_has_no_byte_order_mark(tmp_path: Path) -> None:
    """Bytes that are not UTF-8, and files beyond the limit, are errors with the file's name."""
    file = tmp_path / "a"
    file.write_bytes(b"\xef\xbb\xbfab")
    assert text_of(file, UserError, most_bytes=5) == "ab"
    for content in (b"\xff", b"abcdef"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=str(file)):
            text_of(file, UserError, most_bytes=5)


@pytest.mark.parametrize(
    "arguments",
    [
        ("catalog", "gpus", "--catalog", "./endless.toml"),
        ("estimate", "--config", "endless"),
        (*ESTIMATE, "./endless.json"),
        (*ESTIMATE, "llama-tiny", "--length-histogram", "endless"),
        (*ESTIMATE, "llama-tiny", "--prices", "endless"),
        ("fit", "endless.csv"),
        ("plan", "endless"),
    ],
)
def test_a_device_is_refused_before_it_is_read(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """It never ends; its first 256 MiB took seconds, and a gigabyte of memory."""
    for name in ("endless", "endless.toml", "endless.json", "endless.csv"):
        Path(name).symlink_to("/dev/zero")
    assert main(arguments) == 1
    output = capsys.readouterr().err
    assert output.endswith(": is a device: give a file\n")
    assert output.count("\n") == 1


@pytest.mark.parametrize("name", ["a.toml", "a.json"])
def test_nesting_has_a_limit_that_is_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the reader itself follows no further."""
    command = ("catalog", "gpus", "--catalog") if name == "a.toml" else ESTIMATE
    begin, end = ("a = ", "") if name == "a.toml" else ('{"a": ', "}")
    for levels in (201, 5000):
        Path(name).write_text(f"{begin}{'[' * levels}{']' * levels}{end}", encoding="utf-8")
        assert main([*command, f"./{name}"]) == 1
        assert capsys.readouterr().err.endswith(" is nested more than 200 levels deep\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "pipe"),
        ("estimate", "--config", "pipe"),
        ("catalog", "prices", "--prices", "pipe"),
    ],
)
def test_a_pipe_that_nothing_writes_to_is_one_line(
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No command waits for a writer that never comes."""
    os.mkfifo("pipe")
    monkeypatch.setattr(user_file, "WRITER_SECONDS", 0.1)
    assert main(arguments) == 1
    output = capsys.readouterr().err
    assert "pipe: nothing writes to this pipe" in output
    assert output.count("\n") == 1


def test_a_pipe_whose_writer_is_late_and_slow_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``<(...)``: only a pipe without a writer is refused, not one with a slow one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(user_file, "WRITER_SECONDS", 2.0)

    def write() -> None:
        time.sleep(0.1)
        with pipe.open("wb", buffering=0) as file:
            time.sleep(2.2)
            file.write(b"a" * 100_000)
            time.sleep(0.1)
            file.write(b"b")

    threading.Thread(target=write, daemon=True).start()
    assert text_of(pipe, UserError) == "a" * 100_000 + "b"


def test_a_pipe_whose_writer_has_ended_keeps_what_it_wrote() -> None:
    """A shell may run the command of ``<(...)`` to its end before this process reads."""
    reading, writing = os.pipe()
    os.write(writing, b"ab")
    os.close(writing)
    try:
        assert text_of(Path(f"/dev/fd/{reading}"), UserError) == "ab"
    finally:
        os.close(reading)
