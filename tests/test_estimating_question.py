"""Mistakes in the options of ``estimate``."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.long_cases import long_cases

import orchestrator
from orchestrator.cli.main import main
from orchestrator.reporting.estimate_tables import as_table

REQUEST = ("estimate", "--model", "mixtral-tiny", "--seq-len", "32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "mixtral-8x7"), "unknown model 'mixtral-8x7': did you mean 'mixtral-8x7b'"),
        (("--gpu", "A101"), "unknown GPU 'A101'"),
        (
            ("--providers", "awss"),
            "--providers: no offer is of provider 'awss': did you mean 'aws'",
        ),
        (
            ("--providers", "nowhere"),
            "--providers: no offer is of provider 'nowhere'; providers: aws, azure, ",
        ),
        (("--interruptions-per-day", "1000"), "--interruptions-per-day 1000: Input should be less"),
        (("--gpu", " ,"), "--gpu names no GPU"),
        (("--gpu", "all,A40"), "--gpu all,A40: "),
        (("--gpu", "A40,L4", "--memory-gib", "10"), "--memory-gib is the memory of one GPU"),
        (("--memory-gib", "0.4"), "A40-0.4GiB: CUDA's context alone takes 0.5 GiB"),
        (("--model", "llama-tiny", "--routing-draws", "2"), "llama-tiny has no experts"),
        (("--routing-draws", "100000"), "give at most 100"),
        (("--group-by-length",), "--group-by-length needs the lengths"),
        (("--cutoff", "16"), "--cutoff 16: the job has no lengths: add --dataset"),
        (("--gpu", "cpu"), "--gpu cpu: only CUDA GPUs are simulated"),
        (("--gpu", "a b", "--memory-gib", "10"), "--gpu 'a b': --key"),
        (("--active-experts", "9"), "active_experts 9 exceeds the 8 experts"),
        (("--method", "full", "--lora-rank", "8"), "lora_rank"),
        (("--method", "lora", "--lora-targets", "nowhere"), "lora_targets nowhere"),
        (("--batch-size", "5", "--effective-batch", "16"), "--batch-size 5 does not divide"),
        (
            ("--gradient-accumulation", "2", "--effective-batch", "16"),
            "effective_batch 16 and gradient_accumulation 2",
        ),
        (("--recipe", "paper"), "--recipe: unknown recipe 'paper'"),
        (("--optimizer", "adam"), "--optimizer"),
        (("--model", "./no/config.json"), "model './no/config.json'"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """The message names the option and the value; stdout is empty and the exit code is 1."""
    assert main([*REQUEST, "--gpu", "A40", *arguments]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("options", "adapted"),
    [
        ({}, "lora-r16-attention-"),
        ({"method": "qlora"}, "qlora-r16-attention-"),
        ({"experts": "looped"}, "lora-r16-experts+router-"),
        ({"lora_targets": "experts,router"}, "lora-r16-experts+router-"),
    ],
)
def test_adapters_of_a_mixture_are_on_attention_unless_experts_are_named(
    options: dict[str, str], adapted: str
) -> None:
    """As TRL trains it: transformers' grouped experts are no linear layers."""
    given = {"method": "lora", "gradient_checkpointing": "off"} | options
    (row,) = orchestrator.estimate("mixtral-tiny", gpu="A40", seq_len=32, batch_size=1, **given)
    recipe = row.estimate.recipe
    assert recipe.startswith(adapted)
    assert ("looped" in recipe) == bool(options.keys() - {"method"})


MISTAKES = (
    *("--model", "llama-tinyy", "--gpu", "A4,L44", "--providers", "awss", "--optimizer", "adam"),
    *("--price-drift", "5", "--constants", "none.json"),
)
NAMED = ("llama-tinyy", "'A4'", "'L44'", "awss", "--optimizer", "--price-drift 5", "none.json")


def test_all_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Model, GPUs, offers, recipe, overheads and files: a line each."""
    assert main([*REQUEST, *MISTAKES]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(NAMED)
    for name in NAMED:
        assert sum(name in line for line in lines) == 1


def test_wrong_values_are_reported_with_all_other_mistakes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are mistakes of usage; nothing is reported that follows from a wrong value."""
    wrong = ("--seq-len", "0", "--batch-size", "all", "--method", "loraa")
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *MISTAKES, *wrong])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(NAMED) + 3
    for name in (*NAMED, *wrong[::2]):
        assert sum(name in line for line in lines) == 1


def test_mistakes_in_the_data_are_reported_with_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first examples are read, whatever else is wrong."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n[]\n', encoding="utf-8")
    data = ("--dataset", str(path), "--text-fields", "text", "--tokenizer", str(tmp_path))
    assert main([*REQUEST, "--gpu", "A4", *data]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for begin in ("unknown GPU", "--tokenizer", f"{path}:2: "):
        assert sum(line.startswith(begin) for line in lines) == 1


@pytest.mark.parametrize(
    ("options", "batch_size", "effective_batch"),
    [
        ({}, 16, 16),
        ({"batch_size": 4}, 4, 16),
        ({"batch_size": 3}, 3, 15),
        ({"batch_size": 32}, 32, 32),
        ({"effective_batch": 64, "batch_size": 8}, 8, 64),
        ({"gradient_accumulation": 2, "batch_size": 8}, 8, 16),
        ({"defaults": "plain", "batch_size": 8}, 8, 8),
    ],
)
def test_an_optimizer_step_has_16_examples_unless_stated(
    options: dict[str, Any], batch_size: int, effective_batch: int
) -> None:
    """The micro-batch that is asked for stays; without one, it is the largest that divides."""
    stated: dict[str, Any] = {"method": "lora", "gradient_checkpointing": "off"}
    estimates = orchestrator.estimate("llama-tiny", gpu="A40", seq_len=32, **stated, **options)
    estimate = next(iter(estimates)).estimate
    assert estimate.batch_size == batch_size
    assert estimate.batch_size * estimate.micro_batches == effective_batch


def test_an_option_that_fp16_excludes_serves_gpus_with_bf16(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GPUs without bf16 refuse it by their own line."""
    option = ("--method", "lora", "--modules-to-save", "lm_head")
    assert main([*REQUEST, *option, "--gpu", "A40,T4", "--json"]) == 0
    shown = capsys.readouterr()
    assert [estimate["gpu"] for estimate in json.loads(shown.out)] == ["A40"]
    assert "T4: precision" in shown.err


@pytest.mark.parametrize(
    ("options", "tokens", "is_assumed"),
    [
        ({}, 1024, True),
        ({"packing": True}, 1024, True),
        ({"seq_len": 64}, 64, False),
        ({"length_histogram": "lengths.csv", "packing": True, "seq_len": 64}, 64, False),
        *long_cases([({"length_histogram": "lengths.csv"}, 40, False)]),
    ],
)
def test_without_lengths_examples_have_trls_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    tokens: int,
    *,
    is_assumed: bool,
) -> None:
    """The estimate says so, and asks for nothing."""
    monkeypatch.chdir(tmp_path)
    Path("lengths.csv").write_text("tokens,examples\n16,10\n40,5\n")
    estimated = orchestrator.estimate(model="llama-tiny", method="full", gpu="A40", **options)
    (row,) = estimated.estimated
    assert row.estimate.seq_len == tokens
    assert ("--seq-len" in row.question.by_default) is is_assumed


def test_an_assumed_density_of_packed_rows_is_said_before_the_recommendation() -> None:
    """Hours and dollars depend on it, and no option or data of the job states it."""
    packed = {"model": "llama-tiny", "method": "full", "gpu": "A40", "packing": True, "seq_len": 64}
    for options, is_assumed in (
        ({}, True),
        ({"examples_per_row": 2}, False),
        ({"steps": 9}, False),
    ):
        answered = orchestrator.estimate(**packed, effective_batch=16, **options)
        assert ("--examples-per-row" in answered.estimated[0].estimate.assumed) is is_assumed
        before, _, _ = as_table(answered.estimated, answered.question).partition("Rent ")
        assert ("inversely proportional to the 2 examples a row" in before) is is_assumed


def test_grpo_needs_the_tokens_of_prompt_and_completion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """TRL cuts no prompt there, so no length is assumed."""
    assert main(["estimate", "--model", "llama-tiny", "--task", "grpo", "--gpu", "A40"]) == 1
    assert "--seq-len is missing" in capsys.readouterr().err
