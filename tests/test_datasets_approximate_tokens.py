"""Approximate token counts, and their errors on five corpora."""

import base64
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from orchestrator.datasets.approximate_tokens import VOCABULARIES, ApproximateCounter, vocabulary_of

PACKAGES = Path(__file__).parent.parent / ".venv-trainers" / "tokenizers"
CORPORA = Path(__file__).parent / "data" / "corpora"
# Tokens of each corpus by the tokenizers themselves, without special tokens: ``make trainers``.
COUNTED = {
    "Mistral 7B v0.1": {"chat": 653, "cjk": 795, "code": 942, "maths": 891, "scripts": 1104},
    "Llama 3": {"chat": 584, "cjk": 541, "code": 753, "maths": 861, "scripts": 592},
    "Mistral Nemo": {"chat": 595, "cjk": 582, "code": 784, "maths": 856, "scripts": 505},
    "Qwen 2.5": {"chat": 588, "cjk": 500, "code": 765, "maths": 904, "scripts": 864},
}


def texts(name: str) -> list[str]:
    """Contents of the messages of a corpus."""
    lines = (CORPORA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [message["content"] for line in lines for message in json.loads(line)["messages"]]


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=lambda one: one.name)
def test_counts_are_within_their_stated_error(vocabulary: object) -> None:
    """On English chat, code, maths, three other scripts, and Chinese, Japanese and Korean."""
    for one in VOCABULARIES:
        if one is vocabulary:
            errors = [
                abs(sum(map(one.tokens, texts(name))) / tokens - 1)
                for name, tokens in COUNTED[one.name].items()
            ]
            assert one.error - 0.02 < max(errors) <= one.error


def test_a_vocabulary_is_the_nearest_in_size() -> None:
    """The error is doubled for a size that was not measured; tiny ones have no rates."""
    llama = vocabulary_of(128_256)
    assert llama is not None
    assert (llama.name, llama.error) == ("Llama 3", 0.13)
    mistral = vocabulary_of(32_768)
    assert mistral is not None
    assert mistral.error == 0.15
    gemma = vocabulary_of(256_000)
    assert gemma is not None
    assert (gemma.name, gemma.error) == ("Qwen 2.5", 0.24)
    assert vocabulary_of(1024) is None


def test_an_empty_text_has_no_tokens_and_a_message_those_of_the_template() -> None:
    """A message without text, such as a call of a tool, is counted as written."""
    with ApproximateCounter(VOCABULARIES[1]) as counter:
        chunk = ["", "word", [{"role": "user", "content": "word"}], [{"tool_calls": ["f"]}]]
        (counts,) = counter.counted([chunk])
    assert counts.tokens[:3] == [0, 2, 6]
    assert counts.tokens[3] > 6


@pytest.mark.trainers
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="make trainers installs the tokenizers")
def test_the_tokenizers_themselves_count_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that packages of PyPI contain: llama-models, mistral-common and dashscope."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    for name, count in _tokenizers().items():
        for corpus, tokens in COUNTED[name].items():
            assert sum(map(count, texts(corpus))) == tokens


def _tokenizers() -> dict[str, Callable[[str], int]]:
    tiktoken = import_module("tiktoken")
    sentencepiece = import_module("sentencepiece")
    words = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    rest = r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""

    def ranks(path: str) -> dict[bytes, int]:
        lines = (PACKAGES / path).read_bytes().splitlines()
        pairs = (line.split() for line in lines if line)
        return {base64.b64decode(token): int(rank) for token, rank in pairs}

    def counting(pattern: str, tokens: dict[bytes, int]) -> Callable[[str], int]:
        made = tiktoken.Encoding("made", pat_str=pattern, mergeable_ranks=tokens, special_tokens={})
        return lambda text: len(made.encode_ordinary(text))

    data = PACKAGES / "mistral_common" / "data"
    tekken = json.loads((data / "tekken_240911.json").read_text(encoding="utf-8"))
    size = tekken["config"]["default_vocab_size"] - tekken["config"]["default_num_special_tokens"]
    nemo = {base64.b64decode(one["token_bytes"]): one["rank"] for one in tekken["vocab"][:size]}
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer.model.v1"))
    llama = ranks("llama_models/llama3/tokenizer.model")
    qwen = ranks("dashscope/resources/qwen.tiktoken")
    return {
        "Mistral 7B v0.1": lambda text: len(pieces.encode(text)),
        "Llama 3": counting(words + rest, llama),
        "Mistral Nemo": counting(tekken["config"]["pattern"], nemo),
        "Qwen 2.5": counting(words.replace("{1,3}", "") + rest, qwen),
    }
