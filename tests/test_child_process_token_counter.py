"""The process that counts tokens ends with the command, whatever it is doing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from builders.data import train_tokenizer

from trials.training import tokenizer_worker
from trials.training.tokenizer_worker import ExampleTokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
COUNTS = """
import sys
from trials.child_process.token_counter import TokenCounter
with TokenCounter(sys.argv[1]) as counter:
    counter.need_chat_template()
    print(counter._process.pid, flush=True)
    list(counter.counted([[[{"role": "user", "content": "Why?"}]]]))
"""


def test_a_chat_template_that_never_ends_is_refused_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run once; every later conversation is refused at once."""
    train_tokenizer(tmp_path / "tok", ["one two three"] * 20)
    file = tmp_path / "tok" / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(fields | {"chat_template": ENDLESS}), encoding="utf-8")
    monkeypatch.setattr(tokenizer_worker, "TEMPLATE_SECONDS", 0.2)
    tokenizer = ExampleTokenizer(str(tmp_path / "tok"))
    before = signal.getsignal(signal.SIGVTALRM)
    began = time.process_time()
    counts = tokenizer.chats_counted([[{"role": "user", "content": "Why?"}]] * 1000)
    assert time.process_time() - began < 10
    assert counts.tokens == [0] * 1000
    limit = "the chat template takes more than 0.2 s for one conversation"
    assert set(counts.refused.values()) == {limit}
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_the_chat_template_renders_the_tools_of_a_conversation(tmp_path: Path) -> None:
    """As trainers hand them to it; without any it has none."""
    train_tokenizer(tmp_path / "tok", ["one two three"] * 20)
    file = tmp_path / "tok" / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    template = "{{ tools[0].name if tools else 'none' }}: {{ messages[0].content }}"
    file.write_text(json.dumps(fields | {"chat_template": template}), encoding="utf-8")
    tokenizer = ExampleTokenizer(str(tmp_path / "tok"))
    message = {"role": "user", "content": "Why?"}
    assert tokenizer.written([message]) == "none: Why?"
    assert tokenizer.written([{"tools": [{"name": "look_up"}]}, message]) == "look_up: Why?"


@pytest.mark.long
def test_a_chat_template_that_never_ends_ends_with_the_command(tmp_path: Path) -> None:
    """A killed command leaves no process behind that computes for ever."""
    train_tokenizer(tmp_path / "tok", ["one two three"] * 20)
    file = tmp_path / "tok" / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(fields | {"chat_template": ENDLESS}), encoding="utf-8")
    command = subprocess.Popen(
        [sys.executable, "-c", COUNTS, str(tmp_path / "tok")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert command.stdout is not None
    child = psutil.Process(int(command.stdout.readline()))
    before = sum(child.cpu_times()[:2])
    end = time.monotonic() + 60
    while sum(child.cpu_times()[:2]) < before + 1.0 and time.monotonic() < end:
        time.sleep(0.05)  # it is in the template
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    command.stdout.close()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()
