"""Profiles as rows and bars, and the command that makes them of a real cell."""

import json

import pytest
from builders.observations import observation
from builders.profiles import profile, profiled

from orchestrator.cli.main import main
from orchestrator.reporting.sections.profile_groups import Bar, profile_groups
from orchestrator.reporting.sections.profile_section import profiles_section
from trials.records.observation import Observation, Outcome
from trials.records.profile import Profiled, logged, sizes_to_profile

FAILED = {"outcome": Outcome.FAILED, "detail": "the child was killed", "profile": None}


def parts(bar: Bar) -> dict[str, tuple[float, float]]:
    """Seconds and share of each part."""
    return {p.name: (round(p.seconds, 9), round(p.share, 9)) for p in bar.parts}


def test_seconds_are_those_of_unprofiled_steps() -> None:
    """A row has its profiled share of its stage; recomputation is a part of the backward pass."""
    (group,) = profile_groups([profiled()])
    seconds = {"forward": 1.0, "backward": 4 / 3, "recompute": 2 / 3, "optimizer": 0.5}
    assert parts(group.stages[0]) == {
        name: (round(value, 9), round(value / 3.5, 9)) for name, value in seconds.items()
    }
    layers = parts(group.layers[0])
    assert {name: seconds for name, (seconds, _) in layers.items()} == {
        "attention": 0.5,
        "experts": round(0.5 + 2.0 * 5 / 6, 9),
        "loss": round(2.0 / 6, 9),
    }
    assert sum(share for _, share in layers.values()) == pytest.approx(1.0)
    flops = {p.name: p.flop_share for p in group.layers[0].parts}
    assert flops == {"attention": 0.1, "experts": 0.9, "loss": 0.0}
    inside = [p.name for p in group.inside[0].parts]
    assert inside == ["matmul gate", "host"]
    (overhead,) = group.overheads
    assert overhead.overhead == pytest.approx(0.5)
    assert overhead.stages_over_step == pytest.approx(1.0)


def test_expert_load_has_a_mean_a_variance_and_an_imbalance() -> None:
    """Tokens per example averaged over the layers, their variance, and the busiest expert."""
    (group,) = profile_groups([profiled()])
    (load,) = group.loads
    assert load.before == (2.5, 1.5)
    assert load.after == (3.0, 1.0)
    assert (load.variance_before, load.variance_after) == (0.25, 1.0)
    assert (load.imbalance_before, load.imbalance_after) == (1.25, 1.5)


def test_lengths_are_compared_where_several_were_profiled() -> None:
    """Each length is profiled at its largest batch size."""
    one = [profiled(1), profiled(8, profile=profile(2.0))]
    assert profile_groups(one)[0].lengths == ()
    (group,) = profile_groups([*one, profiled(4, 32)])
    assert [(r.seq_len, r.batch_size, r.step_seconds) for r in group.lengths] == [
        (16, 8, 7.0),
        (32, 4, 3.5),
    ]
    assert group.lengths[0].tokens_per_second == pytest.approx(8 * 16 / 7.0)


def test_a_failed_profile_is_listed_and_tried_three_times() -> None:
    """A batch size that succeeded at last is not a failure."""
    again = [profiled(**FAILED), profiled(attempt=2), profiled(7, **FAILED)]
    (group,) = profile_groups(again)
    (failure,) = group.failures
    assert "batch 7: failed" in failure
    assert f"- {failure}" in profiles_section(again)
    assert profiles_section([]) == ""
    assert sizes_to_profile(7, again) == [1, 7]
    thrice = [profiled(7, attempt=n, **FAILED) for n in (1, 2, 3)]
    assert sizes_to_profile(7, [profiled(1), *thrice]) == []
    assert sizes_to_profile(0, []) == []


@pytest.mark.long
def test_the_command_profiles_a_cell_in_a_child(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has raw profiles and tables at the requested batch size."""
    options = ["--model", "llama-tiny", "--seq-len", "8", "--device", "cpu", "--precision", "fp32"]
    assert main(["profile", *options, "--batch-size", "2", "--steps", "1", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    (raw,) = output["profiles"]
    made = Profiled.model_validate_json(json.dumps(raw))
    assert (made.batch_size, made.cell.seq_len, made.outcome) == (2, 8, Outcome.FITS)
    (group,) = output["tables"]
    assert [part["name"] for part in group["stages"][0]["parts"]] == [
        "forward",
        "backward",
        "recompute",
        "optimizer",
    ]
    assert group["inside_of"] == "mlp"


def test_every_mistake_of_the_command_is_reported_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each has its own line, and nothing starts."""
    command = ["profile", "--model", "llama-tny", "--seq-len", "8", "--device", "a40x"]
    assert main([*command, "--method", "full", "--lora-rank", "3"]) == 1
    lines = capsys.readouterr().err.splitlines()
    for line, mistake in zip(lines, ("a40x", "llama-tny", "lora_rank 3"), strict=True):
        assert mistake in line
    command = ["profile", "--model", "mixtral-tiny", "--seq-len", "8", "--device", "cpu"]
    assert main([*command, "--active-experts", "2,9", "--attention", "flash_attention_2"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "active_experts 9" in lines[0]
    assert "flash_attention_2" in lines[1]


def test_a_profile_is_distinguished_from_an_observation_however_its_line_is_written() -> None:
    """Tools that rewrite JSON put spaces into it."""
    line = profiled().model_dump_json()
    assert logged(line.encode()) == logged(json.dumps(json.loads(line), indent=1).encode())
    assert isinstance(logged(observation(1).model_dump_json().encode()), Observation)
