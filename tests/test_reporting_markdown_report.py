"""The Markdown report of a run: its sections and the numbers in them."""

import re

from builders.observations import environment, measurement, observation
from builders.runs import ONE_CELL, spec_of, whole_trial

from fitting.laws.fit_result import Law
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.reporting.markdown_report import markdown
from orchestrator.reporting.sections.law_section import LAW_NAMES
from orchestrator.run_folder.run_results import RunResults
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.observation import Basis, Observation, Outcome

SPEC = spec_of()
(CELL,) = SPEC.all_cells()
SEEN = whole_trial(CELL, SPEC)
LARGE = environment(device_name="NVIDIA H200", host="gpu1", allocator="expandable_segments:True")


def report(
    observations: list[Observation], spec: SweepSpec = SPEC, plan: Plan | None = None
) -> str:
    """The report of some observations."""
    catalog = spec.merged_catalog()
    plan = plan or make_plan(spec, catalog, ClusterResources((Node({"CPU": 1.0}),)), observations)
    return markdown(RunResults(spec, catalog, plan, observations))


def headings(text: str) -> list[str]:
    """Titles of the sections of a report."""
    return [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]


def part(text: str, heading: str) -> str:
    """One section of a report, without its title."""
    return text.partition(f"## {heading}\n\n")[2].partition("\n\n## ")[0]


def test_a_section_without_content_is_absent() -> None:
    """A run of one recipe has no recipe comparison, no unstable steps and no energy."""
    assert headings(report(SEEN)) == [
        "Cheapest",
        "Every offer",
        "Largest batch that fits",
        "Laws of the step time",
        "Fits",
        "Stacks",
    ]


def test_the_title_has_the_name_the_models_and_the_job() -> None:
    """Of many models it counts the last ones."""
    assert report(SEEN).startswith("# made: llama-tiny, 1,000 examples x 3 epochs\n")
    once = report(SEEN, spec_of(ONE_CELL.replace("epochs: 3", "epochs: 1")))
    assert once.startswith("# made: llama-tiny, 1,000 examples x 1 epoch\n")
    assert "1,000 examples x 1 epoch." in once.partition("## ")[0]
    models = "llama-tiny, llama-2-7b, llama-3.1-8b, qwen3-moe-tiny"
    many = spec_of(ONE_CELL.replace("llama-tiny", models))
    assert "# made: llama-tiny, llama-2-7b, llama-3.1-8b and 1 more, 1,000" in report([], many)


def test_a_run_without_observations_claims_nothing() -> None:
    """It lists every cell as excluded, with the reason."""
    text = report([])
    assert headings(text) == ["Cheapest"]
    assert "Nothing can be ranked" in text
    assert f"- {CELL.key}: not measured" in text


def test_recipes_energy_and_unstable_steps_have_sections() -> None:
    """A run with two recipes, an energy counter and varying step times."""
    two = ONE_CELL.replace("fp32}]", "fp32}, {method: lora, lora_rank: 4, precision: fp32}]")
    spec = spec_of(two)
    observations = [o for cell in spec.all_cells() for o in whole_trial(cell, spec)]
    shaky = measurement(step_seconds=(0.1, 0.3) * 6).model_copy(
        update={"stop_reason": "step cap", "energy_joules": 60.0}
    )
    observations.append(observation(2, cell=CELL, purpose="ladder", repeat=7, measurement=shaky))
    text = report(observations, spec)
    assert headings(text)[2:6] == [
        "Recipes side by side",
        "Largest batch that fits",
        "Unstable step times",
        "Energy",
    ]
    assert "full weights" in part(text, "Recipes side by side")
    # 60 J over 12 steps of 2 examples, which took 2.4 s.
    energy = part(text, "Energy").strip().splitlines()[-1]
    assert [cell.strip() for cell in energy.split("|")[4:6]] == ["2.5", "25"]


def test_every_stack_has_its_hosts() -> None:
    """Hosts of other stacks are not among them; the allocator's settings belong to the stack."""
    second = environment(host="there")
    observations = [
        *SEEN,
        observation(1, cell=CELL, environment=second, repeat=8),
        observation(1, cell=CELL, environment=LARGE, repeat=9),
        observation(1, Outcome.OUT_OF_MEMORY, cell=CELL, environment=None, repeat=10),
    ]
    lines = part(report(observations), "Stacks").strip().splitlines()
    stacks = {line[2:].partition(":")[0]: re.split("[:;] ", line)[1:] for line in lines}
    software = "CPU threads 1, python 3.11.1, torch 2.9.0"
    assert stacks == {
        second.stack: [f"a processor, {software}", "hosts here, there"],
        LARGE.stack: [
            f"NVIDIA H200, {software}",
            "allocator expandable_segments:True",
            "hosts gpu1",
        ],
    }


def test_an_allocator_without_settings_has_the_defaults_of_pytorch() -> None:
    """A CPU has no allocator."""
    assert "allocator" not in part(report(SEEN), "Stacks")
    bare = observation(1, cell=CELL, environment=LARGE.model_copy(update={"allocator": ""}))
    assert "PyTorch by default" in part(report([*SEEN, bare]), "Stacks")


def test_a_capped_gpu_has_a_largest_batch_and_no_offer() -> None:
    """Even if its steps were timed."""
    spec = spec_of(
        ONE_CELL.replace("gpus: [cpu]", "gpus: [cpu]\nas_if: [small]")
        + """\
catalog:
  gpus:
    - {key: small, kind: cpu, usable_memory_bytes: 9000000, source: me, recorded: 2026-01-31}
  offers:
    - {gpu: small, provider: own, region: here, instance: box, usd_per_hour: 0.01, source: me,
       recorded: 2026-01-31}
"""
    )
    (capped,) = [cell for cell in spec.all_cells() if cell.capped_on is not None]
    probes = (
        observation(8, cell=capped, purpose="ladder", measurement=measurement(step_seconds=(0.1,))),
        observation(9, Outcome.OUT_OF_MEMORY, cell=capped),
    )
    capped_probes = [o.model_copy(update={"basis": Basis.CAPPED}) for o in probes]
    text = report([*SEEN, *capped_probes], spec)
    assert capped.key in part(text, "Largest batch that fits")
    assert "own box" not in text
    assert f"- {capped.key}: its largest batch, 8, " in part(text, "Cheapest")
    fits = [line for line in part(text, "Fits").splitlines() if "| capped" in line]
    assert [line.split("|")[1].strip() for line in fits] == [
        LAW_NAMES[Law.MAX_BATCH_EQ1],
        LAW_NAMES[Law.MEMORY_AFFINE],
    ]


def test_pretrained_weights_are_named_beside_the_model() -> None:
    """Random weights are the default and not named."""
    loaded = CELL.model_copy(update={"weights": "pretrained"})
    plan = Plan(complete=(loaded,), pending=(), skipped=())
    observations = [o.model_copy(update={"cell": loaded}) for o in SEEN]
    assert "pretrained**" in part(report(observations, plan=plan), "Cheapest")
    assert "pretrained" not in report(SEEN)


def test_of_many_offers_the_cheapest_are_listed() -> None:
    """The rest is counted; ranking.csv has them."""
    offers = "".join(
        f"    - {{gpu: cpu, provider: own, region: here, instance: i{n}, usd_per_hour: {n + 1}.0, "
        "source: me, recorded: 2026-01-31}\n"
        for n in range(40)
    )
    spec = spec_of(f"{ONE_CELL}catalog:\n  offers:\n{offers}")
    every = part(report(SEEN, spec), "Every offer")
    rows = [line for line in every.splitlines() if line.startswith("| ") and "measured" in line]
    assert len(rows) == 25
    offers_of_cpu = len(spec.merged_catalog().offers("cpu"))
    assert f"ranking.csv: {offers_of_cpu - 25}." in every


def test_the_recommendation_is_a_sentence() -> None:
    """Offer, price and odds, then the cheapest offer that is not spot."""
    rows = (
        "catalog:\n  offers:\n"
        "    - {gpu: cpu, provider: own, region: here, instance: desk, usd_per_hour: 0.02, "
        "market: spot, source: me, recorded: 2026-01-31}\n"
        "    - {gpu: cpu, provider: own, region: here, instance: rack, usd_per_hour: 0.05, "
        "source: me, recorded: 2026-01-31}\n"
    )
    text = report(SEEN, spec_of(ONE_CELL + rows))
    sentence = part(text, "Cheapest").splitlines()[0]
    assert sentence.startswith("- llama-tiny")
    assert re.findall(r"cpu.*?\((\w+)\)", sentence) == ["desk", "rack"]
    assert "at $0.02 an hour" in sentence
    assert "**more than 99%**" in sentence
    odds = re.findall(r"\| ([^|%]*%) *\|", part(text, "Every offer"))
    assert {odds[0], odds[-1]} == {"more than 99%", "less than 1%"}  # of the sentence, too


def test_a_gpu_of_ones_own_is_called_so_in_sentence_and_table() -> None:
    """A price list of two columns names no machine."""
    mine = "{gpu: cpu, provider: own, region: own, instance: cpu, usd_per_hour: 0.02, source: me,"
    rows = f"catalog:\n  offers:\n    - {mine} recorded: 2026-01-31}}\n"
    text = report(SEEN, spec_of(ONE_CELL + rows))
    assert "Use your **cpu** at" in part(text, "Cheapest")
    assert "| your own " in part(text, "Every offer")
    assert "own cpu on-demand" not in text


def test_many_cells_excluded_for_one_reason_are_one_line() -> None:
    """The line has their number."""
    spec = spec_of(ONE_CELL.replace("[16]", "[16, 32, 48, 64]"))
    text = report([], spec)
    assert "- 4 cells: not measured" in text


def test_a_short_job_has_a_note_on_its_start_up() -> None:
    """Start-up is assumed, and the same for every GPU."""
    note = "hours are mostly the assumed start-up: "
    assert note in report(SEEN)
    long = SPEC.model_copy(
        update={"workload": SPEC.workload.model_copy(update={"examples": 10**8})}
    )
    assert note not in report(SEEN, long)
