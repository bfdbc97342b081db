"""A sweep of simulated cells: without Ray or GPU, every number is marked as simulated."""

import csv
import json
import os
from pathlib import Path

import pytest
from builders.observations import environment, measurement
from builders.runs import spec_of, whole_trial

from fitting.families.cell_step_time import StepTimeSource
from orchestrator.cli.main import main
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.ranking import rank
from orchestrator.spec.spec_file import SpecError, parse_spec
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, surviving_batch

SIMULATED = """\
name: nobody
gpus: [cpu]
cells:
  - models: [llama-tiny]
    recipes: [{method: lora, lora_rank: 4}]
    seq_lens: [16]
    simulated_on: [A40, H100-SXM, T4]
workload: {examples: 1000, epochs: 3}
max_batch_size: 64
"""
BOTH = """\
name: both
gpus: [A40]
cells:
  - models: [llama-tiny]
    recipes: [{method: lora, lora_rank: 4}]
    seq_lens: [16]
  - models: [llama-tiny]
    recipes: [{method: lora, lora_rank: 4}]
    seq_lens: [32]
    simulated_on: [A40]
workload: {examples: 1000, epochs: 3}
max_batch_size: 64
"""


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory and no cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


def observed(folder: Path) -> list[Observation]:
    """The observations of the run."""
    lines = (folder / "observations.jsonl").read_text().splitlines()
    return [Observation.model_validate_json(line) for line in lines]


def test_a_simulated_sweep_is_ranked_and_marked_as_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Observations, ranking and report are marked; a second sweep simulates nothing again."""
    Path("nobody.yaml").write_text(SIMULATED)
    assert main(["sweep", "nobody.yaml"]) == 0
    shown = capsys.readouterr()
    run = tmp_path / "runs" / "nobody"
    observations = observed(run)
    assert {o.basis for o in observations} == {Basis.SIMULATED}
    # The search begins at the largest batch that the replays give: the limit.
    assert {o.batch_size for o in observations if o.purpose == "search"} == {64}
    assert all(o.cell.simulated and "simulated" in o.cell.key for o in observations)
    assert all(o.measurement is None or o.measurement.built is None for o in observations)
    timed = [o.measurement for o in observations if o.measurement and o.measurement.step_seconds]
    assert all(m.relative_error for m in timed)
    with (run / "ranking.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["basis"] for row in rows} == {"simulated"}
    assert all(float(row["usd_low"]) < float(row["usd"]) < float(row["usd_high"]) for row in rows)
    assert "traced and replayed" in shown.out
    assert "T4(simulated)" in shown.err  # bf16, skipped with the reason
    assert "compute capability 8.0" in shown.err
    assert main(["sweep", "nobody.yaml"]) == 0
    assert len(observed(run)) == len(observations)
    plan = Plan.model_validate(json.loads((run / "plan.json").read_text()))
    assert (len(plan.complete), plan.pending, len(plan.skipped)) == (2, (), 1)


@pytest.mark.long
def test_simulated_examples_have_the_lengths_of_the_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The specification has one length, `estimate` agrees, and a second run needs no trace."""
    # Each length costs this test a second.
    monkeypatch.setattr("orchestrator.spec.job_tokens.SIMULATED_PADDED", (1, 64))
    Path("lengths.csv").write_text("tokens,examples\n64,800\n128,150\n512,50\n")
    data = ["--length-histogram", "lengths.csv", "--epochs", "3"]
    text = SIMULATED.replace("[16]", "[512]").replace("H100-SXM, T4", "H100-SXM")
    Path("nobody.yaml").write_text(text.replace("examples: 1000", "length_histogram: lengths.csv"))
    assert main(["sweep", "nobody.yaml"]) == 0
    assert "lengths.csv, padded to" in capsys.readouterr().out
    recipe = ["--method", "lora", "--lora-rank", "4", "--defaults", "plain"]
    what = ["--model", "llama-tiny", *recipe, "--batch-size", "64"]
    assert main(["estimate", *what, "--gpu", "A40,H100-SXM", *data, "--json"]) == 0
    estimated = {e["gpu"]: e for e in json.loads(capsys.readouterr().out)}
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)  # a trace would fail from here on
    assert main(["what-if", "runs/nobody", *data, "--batch-size", "64", "--json"]) == 0
    offers = json.loads(capsys.readouterr().out)["offers"]
    assert {row["cell"]["gpu"] for row in offers} == set(estimated) == {"A40", "H100-SXM"}
    observations = observed(Path("runs/nobody"))
    drawn = {o.cell.gpu: surviving_batch([o]) for o in observations if o.is_drawn}
    assert drawn == {"A40": 64, "H100-SXM": 64}  # the search's limit
    assert all(estimate["surviving_batch_size"] >= 64 for estimate in estimated.values())
    for row in offers:
        there = estimated[row["cell"]["gpu"]]
        assert (row["law"], row["as_if_full"]) == (None, False)
        assert row["tokens_per_example"] == pytest.approx(there["tokens_per_example"])
        assert row["examples_per_second"] == pytest.approx(there["examples_per_second"], rel=0.03)


def test_a_model_that_cannot_be_traced_is_excluded_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The others are ranked, and the exit code reports an incomplete sweep."""
    folder = Path("strange")
    folder.mkdir()
    config = {"model_type": "strange", "vocab_size": 64, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    Path("nobody.yaml").write_text(SIMULATED.replace("[llama-tiny]", "[llama-tiny, ./strange]"))
    assert main(["sweep", "nobody.yaml"]) == 1
    shown = capsys.readouterr()
    assert "model_type 'strange'" in shown.out
    assert "llama-tiny" in shown.out


def test_a_cell_is_measured_or_simulated_and_never_both_under_one_key() -> None:
    """One GPU, model and recipe give two cells with different key, basis and plan entry."""
    measured, simulated = spec_of(BOTH).all_cells()
    assert (measured.simulated, simulated.simulated) == (False, True)
    same = simulated.model_copy(update={"simulated": False})
    assert same.key == simulated.key.replace("(simulated)", "")
    nodes = ClusterResources((Node({"CPU": 1.0}),))
    plan = make_plan(spec_of(BOTH), spec_of(BOTH).merged_catalog(), nodes, [])
    assert plan.pending == (simulated,)  # there is no A40 here to measure on
    assert [skip.cell for skip in plan.skipped] == [measured]


def test_measured_stands_before_simulated_at_the_same_cost() -> None:
    """Of two cells with equal speed on one GPU, the measured one ranks first."""
    spec = spec_of(BOTH)
    measured, other = spec.all_cells()
    simulated: Cell = other.model_copy(update={"seq_len": measured.seq_len})
    observations = whole_trial(measured, spec)
    copies = [
        o.model_copy(
            update={
                "cell": simulated,
                "basis": Basis.SIMULATED,
                "environment": environment(device_name="A40, simulated"),
                "measurement": None
                if o.measurement is None
                else measurement(1, o.measurement.step_seconds[:1]).model_copy(
                    update={"relative_error": 0.3, "memory": o.measurement.memory}
                ),
            }
        )
        for o in observations
    ]
    plan = Plan(complete=(simulated, measured), pending=(), skipped=())
    step_times = StepTimeSource([*copies, *observations], ())
    ranking = rank(RankingInputs(spec.workload, spec.merged_catalog(), plan, step_times))
    assert [row.basis for row in ranking.offers[:2]] == [Basis.MEASURED, Basis.SIMULATED]
    assert ranking.offers[0].usd == ranking.offers[1].usd


def test_an_unknown_gpu_to_simulate_has_suggestions() -> None:
    """The mistake has its line, like any other."""
    with pytest.raises(SpecError, match=r"nobody:7: cells\[0\].simulated_on\[1\].*H100-SXM"):
        parse_spec(SIMULATED.replace("H100-SXM", "H100-SMX"), "nobody")
