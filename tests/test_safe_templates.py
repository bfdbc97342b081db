"""A text in a template is one scalar of YAML or one word of bash."""

import subprocess

import pytest
import yaml
from builders.hostile_texts import INJECTIONS, texts
from hypothesis import example, given, settings

from orchestrator.safe_templates import (
    Verbatim,
    shell_value,
    shell_word,
    yaml_block,
    yaml_quoted,
    yaml_scalar,
    yaml_value,
)


@given(texts())
@example("\ud800")
def test_a_text_is_the_same_text_in_yaml(text: str) -> None:
    """As a value, as a key and in a list; in a line of its own."""
    for written in (yaml_scalar(text), yaml_quoted(text)):
        assert len(written.splitlines()) == 1
        assert yaml.safe_load(f"a: {written}  # x\nb: 1") == {"a": text, "b": 1}
        assert yaml.safe_load(f"[{written}, {{b: {written}}}]") == [text, {"b": text}]
        if len(written) < 1000:  # of a key, as YAML limits it
            assert yaml.safe_load(f"{written}: 1\nb: 1") == {text: 1} | {"b": 1}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "us-east-1",
            "Standard_D2s_v5",
            "m8a.large",
            "4xh100-sxm-spot",
            "10.0.0.1",
            "a40.example",
        ),
        *("zones/us-east1-b/diskTypes/pd-balanced", "echo A40 > ~/gpu-key", "/data/runs/x"),
    ],
)
def test_ordinary_names_have_no_quotes(text: str) -> None:
    """So that files stay as one would write them."""
    assert yaml_scalar(text) == text


@pytest.mark.parametrize(
    "text", ["1e5", "0x1F", "0o7", "1_0", "y", "NO", "1:30", "4090", "2026-01-31"]
)
def test_what_any_version_of_yaml_takes_for_no_text_has_quotes(text: str) -> None:
    """Kubernetes reads other numbers and truth values than PyYAML."""
    assert yaml_scalar(text) == f'"{text}"'


@given(texts())
@example("  # a comment\nname: x\n")
@example("\n\n  x\n\n")
@example("x\n \n\t\n")
def test_a_block_is_the_same_text(text: str) -> None:
    """Whatever its first line begins with, and its last ends with."""
    assert yaml.safe_load(f"a:\n  b: {yaml_block(text, 4)}\n  c: 1\n") == {"a": {"b": text, "c": 1}}


def test_an_ordinary_block_has_no_number() -> None:
    """Lines keep their own indentation."""
    assert yaml_block("a:\n  b: 1\n\nc: 2\n", 2) == "|\n  a:\n    b: 1\n\n  c: 2"


@settings(max_examples=40)
@given(texts())
@example("\udcff")
def test_a_text_is_the_same_word_in_bash(text: str) -> None:
    """Also inside a document that ends at a line of its own; bash itself has no word with a NUL."""
    text = text.replace("\0", "")
    word = shell_word(text)
    assert len(word.splitlines()) == 1
    script = f"printf %s {word}\nbash -c \"$(cat << 'JOB'\nprintf %s {word}\nJOB\n)\"\n"
    given_bytes = script.encode("utf-8", "surrogateescape")
    done = subprocess.run(["bash"], input=given_bytes, capture_output=True, check=True)
    assert done.stdout == 2 * text.encode("utf-8", "surrogateescape")
    assert done.stderr == b""


@pytest.mark.parametrize("text", [*INJECTIONS, "\ud800"])
def test_every_word_can_be_written_to_a_file(text: str) -> None:
    """Bytes that are no text are escaped."""
    assert shell_word(text).encode("utf-8")
    assert yaml_scalar(text).encode("utf-8")


def test_values_that_are_no_texts_stay() -> None:
    """Numbers; truth values are those of YAML, and a list is one in a line."""
    assert yaml_value(5) == shell_value(5) == 5
    assert yaml_value(value=True) == "true"
    assert yaml_value(["a", "b: c"]) == '[a, "b: c"]'
    assert yaml_value(Verbatim("a: b")) == shell_value(Verbatim("a: b")) == "a: b"
