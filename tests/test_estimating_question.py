"""Mistakes in the options of ``estimate``."""

import pytest

from orchestrator.cli.main import main

REQUEST = ("estimate", "--model", "mixtral-tiny", "--seq-len", "32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "mixtral-8x7"), "unknown model 'mixtral-8x7': did you mean 'mixtral-8x7b'"),
        (("--gpu", "A100"), "unknown GPU 'A100'"),
        (
            ("--providers", "awss"),
            "--providers: no offer is of provider 'awss': did you mean 'aws'",
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
