"""``check``: exit code 0 where a training fits a GPU, 1 where it does not, 2 where unknown."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checking.memory_check import UNSURE, MemoryCheck, check_text
from orchestrator.cli.main import main
from trials.records.model import find_model

GPU = ("--gpu", "RTX-4090")
TRL = "model_name_or_path: Qwen/Qwen2.5-0.5B\nmax_length: 32\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration of TRL with a micro-batch of 16 and an effective batch of 32."""
    path = tmp_path / "sft.yml"
    text = f"{TRL}per_device_train_batch_size: 16\ngradient_accumulation_steps: 2\n"
    path.write_text(f"{text}loss_type: chunked_nll\n", encoding="utf-8")
    return path


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code and JSON of a check."""
    code = main(["check", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_configuration_that_fits_ends_with_0(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The micro-batch is that of the file, and so is the effective batch."""
    code, check = checked(capsys, "--config", str(config), "--model", "llama-tiny", *GPU)
    assert (code, check["fits"], check["certain"], check["change"]) == (0, True, True, None)
    assert (check["gpu"], check["batch_size"], check["micro_batches"]) == ("RTX-4090", 16, 2)
    assert check["seq_len"] == 32
    assert check["peak_gib"] <= check["reserved_gib"] < check["usable_gib"]


def test_json_lists_what_the_text_says_is_assumed(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of options and of the configuration's keys; what an option replaces is no assumption."""
    start = ("--config", str(config), "--model", "llama-tiny", *GPU, "--json")
    assumed = []
    for command in ("estimate", "check"):
        assert main([command, *start]) == 0
        printed = capsys.readouterr()
        assumed.append(json.loads(printed.out)["assumed"])
        lines = [line for line in printed.err.splitlines() if line.startswith("Assumed for ")]
        assert [f"Assumed for {text}" for text in assumed[-1] if ": " in text] == lines
    assert assumed[0] == assumed[1]
    assert "--examples" in assumed[0]
    assert any(text.startswith("lengths: every row has 32 tokens") for text in assumed[0])


def test_one_that_does_not_fit_ends_with_1_and_a_change_that_fits(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change, given as options, makes the same check end with 0; the effective batch stays."""
    small = ("--config", str(config), "--model", "llama-tiny", *GPU, "--memory-gib", "0.56")
    code, check = checked(capsys, *small)
    change = check["change"]
    assert (code, check["fits"]) == (1, False)
    assert check["reserved_gib"] > check["usable_gib"] >= change["reserved_gib"]
    assert (change["batch_size"] * change["micro_batches"], change["learns_alike"]) == (32, True)
    assert checked(capsys, *small, *change["options"].split())[0] == 0
    for surely_fits in (True, False):
        text = check_text(MemoryCheck(**check | {"change": change | {"surely_fits": surely_fits}}))
        assert (UNSURE in text.partition("It fits with")[2]) != surely_fits


def test_the_keys_of_a_change_are_named_in_the_file(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``check``, and by ``estimate`` where no GPU fits."""
    none_fits = ("--config", str(config), "--model", "llama-tiny", *GPU, "--memory-gib", "0.53")
    keys = f"n {config}: use_peft: true, per_device_train_batch_size: 1, "
    assert main(["check", *none_fits]) == 1
    assert keys in capsys.readouterr().out
    assert main(["estimate", *none_fits, "--examples", "100"]) == 1
    assert f"\nTo fit RTX-4090-0.53GiB, i{keys}" in capsys.readouterr().out


def test_a_name_of_several_gpus_is_one_line_with_their_keys(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the configuration leaves open is said beside an answer alone."""
    assert main(["check", "--config", str(config), "--model", "llama-tiny", "--gpu", "H100"]) == 2
    keys = "H100-SXM, H100-PCIe, H100-NVL"
    assert capsys.readouterr().err == f"--gpu H100 matches 3 GPUs: name one: {keys}\n"


def test_a_card_of_ones_own_needs_no_price_of_electricity(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict is that of the card; a change has dollars where electricity has a price."""
    small = ("--config", str(config), "--model", "llama-tiny", "--memory-gib", "0.56")
    rented = checked(capsys, *small, *GPU)
    code, check = checked(capsys, *small, "--gpu", "own:RTX-4090")
    assert (code, rented[0], check["change"].pop("usd")) == (1, 1, None)
    rented[1]["change"].pop("usd")
    assert check == rented[1]
    priced = checked(capsys, *small, "--gpu", "own:RTX-4090", "--usd-per-kwh", "0.3")[1]
    assert priced["change"]["usd"] > 0


def test_several_gpus_are_checked_together_and_each_takes_the_micro_batches_of_the_file(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two copies train on 64 examples in an optimizer step where one GPU has 32, as the trainer."""
    tiny = ("--config", str(config), "--model", "llama-tiny", "--strategy", "ddp")
    code, check = checked(capsys, *tiny, "--gpu", "2xRTX-4090")
    assert (code, check["gpu"], check["gpus"], check["strategy"]) == (0, "2xRTX-4090", 2, "ddp")
    assert (check["batch_size"], check["micro_batches"]) == (16, 2)
    assert checked(capsys, *tiny, *GPU, "--gpus", "2") == (code, check)
    assert main(["check", *tiny, *GPU, "--gpus", "2"]) == 0
    assert "16 x 2 of 32 tokens on each GPU (ddp)" in capsys.readouterr().out


def test_a_verdict_within_the_error_of_the_memory_is_uncertain(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--strict`` it ends with 2: the interval of the memory includes the limit."""
    start = ("--config", str(config), "--model", "llama-tiny", *GPU)
    reserved = checked(capsys, *start)[1]["reserved_gib"]
    close = (*start, "--memory-gib", f"{reserved * 1.01 + 0.5:.4f}")
    code, check = checked(capsys, *close)
    assert (code, check["fits"], check["certain"]) == (0, True, False)
    assert checked(capsys, *close, "--strict")[0] == 2
    assert checked(capsys, *start, "--strict")[0] == 0


@pytest.mark.parametrize(
    ("text", "arguments", "word"),
    [
        (TRL, ("--gpu", "A100"), "A100-40GB-PCIe"),
        (TRL, ("--gpu", "RTX-4091"), "RTX-4090"),
        (TRL, (*GPU, "--seq-len", "max"), "--seq-len"),
        (f"{TRL}fsdp: full_shard\n", GPU, "fsdp"),
        (f"{TRL}per_device_train_batch_size: 0\n", GPU, "per_device_train_batch_size"),
        ("a: [", GPU, "YAML"),
    ],
)
def test_what_cannot_be_checked_ends_with_2_and_the_reason(
    text: str,
    arguments: tuple[str, ...],
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Never with 1, which would say that the training does not fit."""
    (tmp_path / "sft.yml").write_text(text, encoding="utf-8")
    code, answer = checked(capsys, "--config", str(tmp_path / "sft.yml"), *arguments)
    assert (code, answer["fits"]) == (2, None)
    assert word in answer["reason"]


def test_a_check_needs_a_gpu(config: Path) -> None:
    """All GPUs of the catalog, the default of an estimate, are no single verdict."""
    with pytest.raises(SystemExit) as ended:
        main(["check", "--config", str(config)])
    assert ended.value.code == 2


def test_an_example_longer_than_the_model_supports_is_said(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below the verdict; the longest that it supports has no such line."""
    tiny = ("check", "--config", str(config), "--model", "llama-tiny", *GPU)
    longest = find_model("llama-tiny").positions
    assert longest is not None
    for tokens, is_said in ((longest, False), (longest + 1, True)):
        main([*tiny, "--seq-len", str(tokens)])
        said = f"llama-tiny supports examples of at most {longest:,} tokens."
        assert (said in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("options", "gib", "is_said"),
    [
        ((), "0.56", True),
        ((), "24", False),
        (("--precision", "bf16-mixed"), "0.53", False),
    ],
)
def test_weights_in_fp32_are_named_where_memory_lacks(
    options: tuple[str, ...], gib: str, capsys: pytest.CaptureFixture[str], *, is_said: bool
) -> None:
    """TRL's trainer loads frozen weights so, and an option halves them."""
    lora = ("--model", "llama-tiny", "--method", "lora", "--seq-len", "512", "--batch-size", "8")
    main(["check", *lora, *options, *GPU, "--memory-gib", gib])
    assert ("--precision bf16-mixed halves" in capsys.readouterr().out) == is_said


def test_an_assumed_length_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A verdict on another length than the user's would be none."""
    options = ("--model", "llama-tiny", "--method", "full", *GPU)
    code, check = checked(capsys, *options)
    assert (code, check["seq_len"]) == (0, 1024)
    assert "--seq-len" in check["assumed"]
    assert main(["check", *options]) == 0
    assert "--seq-len 1024" in capsys.readouterr().out
    assert main(["check", *options, "--seq-len", "64"]) == 0
    assert "--seq-len" not in capsys.readouterr().out
