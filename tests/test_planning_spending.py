"""Dollars of a sweep: the expected cost, the cost so far, and the end at a budget."""

from pathlib import Path

import pytest
from builders.observations import environment, observation
from builders.profiles import profiled
from builders.runs import ONE_CELL, spec_of, whole_trial
from builders.s3_runs import LATER, URL
from fakes.ray_sweeps import ended, observations, two_devices

from orchestrator.cli.main import main
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.faults import Fault
from orchestrator.planning.measurement_cost import Budget, remaining_work
from orchestrator.planning.node_pricing import NodePrices, NodeRental, NodeRentals
from orchestrator.planning.plan import make_plan
from orchestrator.planning.spending import Meter
from orchestrator.pricing.offer_constraints import OfferFilter
from orchestrator.reporting.sections.cost_text import expected, expected_text
from orchestrator.run_folder.file_names import RENTED
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.running.recorder import RunJournal
from orchestrator.running.session import SweepSession
from orchestrator.running.trial_executor import TrialExecutor
from orchestrator.scheduling.strategy import ExhaustiveStrategy
from orchestrator.storage.run_storage import StoreError
from orchestrator.storage.s3_storage import S3Storage
from trials.records.observation import Observation

ROWS = """\
catalog:
  gpus:
    - {key: fast, kind: cuda, device_names: [Fast], usable_memory_bytes: 100000000,
       compute_capability: "9.0", source: me, recorded: 2026-01-31}
    - {key: desk, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
  offers:
    - {gpu: fast, provider: pit, region: here, instance: a, usd_per_hour: 3.0, source: me,
       recorded: 2026-01-31}
    - {gpu: fast, provider: pit, region: here, instance: b, usd_per_hour: 2.0, market: spot,
       source: me, recorded: 2026-01-31}
    - {gpu: desk, provider: own, region: here, instance: c, usd_per_hour: 0.5, source: me,
       recorded: 2026-01-31}
"""
SPEC = spec_of(ONE_CELL.replace("[cpu]", "[fast, desk, cpu]") + ROWS)
CATALOG = SPEC.merged_catalog()
RATES = NodePrices(CATALOG)
FAST, DESK, CPU = SPEC.all_cells()
CLUSTER = ClusterResources(
    (
        Node({"CPU": 4.0, "scales-to-desk": 3.0}),
        Node({"CPU": 8.0, "GPU": 1.0, "fast": 1.0}),
    )
)
WHOLE = (5 + 8) * 60.0  # seconds of a trial as assumed: five probes that search, eight timed


def test_a_sweep_is_priced_before_it_starts() -> None:
    """By hand: a node's start and a minute per probe; a CPU has no estimate before probes."""
    plan = make_plan(SPEC, CATALOG, CLUSTER, [])
    left = {work.gpu: work for work in remaining_work(SPEC, RATES, CLUSTER, plan, [])}
    assert {gpu: work.at_a_time for gpu, work in left.items()} == {"fast": 1, "desk": 3, "cpu": 12}
    fast = left["fast"]
    assert fast.hours == pytest.approx((600 + WHOLE) / 3600)
    assert fast.usd == pytest.approx(2 * (600 + WHOLE) / 3600)
    assert (left["desk"].hours, left["cpu"].hours, left["cpu"].offer) == (None, None, None)
    table, line, priced = expected(list(left.values()), Budget(), RATES)
    rows = [[field.strip() for field in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert rows[0] == ["fast", "1", "1 there", "1", "0.38", "2.00", "0.767"]
    assert rows[1][:4] == ["desk", "1", "3 to be started", "3"]
    assert rows[2][:4] == ["cpu", "1", "2 there", "12"]
    for part in ("0.38 h and $0.767", "desk, cpu not counted", "60 s a probe", "10 min to start"):
        assert part in line
    for part in ("fast pit b spot in here at $2.00/h", "cheapest", "--providers", "--no-spot"):
        assert part in priced
    lines = list(expected_text(list(left.values()), Budget(0.5, profiles=True), RATES))
    assert "desk, cpu, profiles not" in lines[0]
    assert "the budget is $0.5" in lines[2]
    assert len(list(expected_text(list(left.values()), Budget(1.0), RATES))) == 2
    *_, spent = expected_text(list(left.values()), Budget(1.0, spent_usd=0.3), RATES)
    assert "$0.30 is spent" in spent


def test_measured_cells_predict_the_cost_of_the_rest() -> None:
    """One of two cells is complete: the other is expected to take as long on a running node."""
    spec = spec_of(ONE_CELL.replace("[cpu]", "[desk]").replace("[16]", "[16, 32]") + ROWS)
    catalog = spec.merged_catalog()
    done, _ = spec.all_cells()
    measured = [o.model_copy(update={"seconds": 2.0}) for o in whole_trial(done, spec, largest=40)]
    searched = sum(o.purpose != "ladder" for o in measured)
    plan = make_plan(spec, catalog, CLUSTER, measured)
    (left,) = remaining_work(spec, NodePrices(catalog), CLUSTER, plan, measured)
    assert left.hours == pytest.approx((searched + 8) * 2 / 3600)
    assert left.usd == pytest.approx(0.5 * (searched + 8) * 2 / 3600)
    assert "assumed" not in next(expected_text([left], Budget(), NodePrices(catalog)))


def test_dollars_are_counted_as_they_are_spent() -> None:
    """A node's start and probes cost the cheapest offer; the user's own machine is free."""
    meter = Meter(SPEC, RATES)
    assert meter.usd is None
    meter.observed(observation(1, cell=CPU, seconds=100.0))
    assert meter.usd is None
    probes = [observation(b, cell=FAST, seconds=90.0) for b in (1, 2)]
    for entry in probes:
        meter.observed(entry)
    assert meter.usd == pytest.approx(2 * (600 + 180) / 3600)
    profile = profiled(8, cell=FAST, seconds=30.0)
    meter.observed(profile)
    assert meter.usd == pytest.approx(2 * (600 + 210) / 3600)
    again = Meter(SPEC, RATES, [*probes, profile])
    assert {entry.gpu: entry.usd for entry in again.spent} == {"fast": meter.usd}
    meter.observed(observation(1, cell=DESK, seconds=3600.0))  # one's own is up already
    assert meter.usd == pytest.approx(2 * (600 + 210) / 3600 + 0.5)
    assert not meter.reaches(None)
    assert not meter.reaches(1.0)
    assert meter.reaches(meter.usd or 0.0)


def ran(host: str, node_id: str | None, seconds: float = 36.0) -> Observation:
    """A probe of the fast GPU on a node."""
    return observation(
        1, cell=FAST, seconds=seconds, environment=environment(host=host, node_id=node_id)
    )


def died(node_id: str | None, seconds: float) -> Fault:
    """A trial of the fast GPU that died on a node."""
    return Fault(
        kind="died", gpu="fast", node_id=node_id, reason="why", at="now", lost_seconds=seconds
    )


def test_each_node_pays_for_its_start_and_its_dead_trials() -> None:
    """Computed by hand at two dollars an hour and ten minutes per start."""
    meter = Meter(SPEC, RATES, [ran("one", "a"), ran("two", "b")], [died("b", 18.0)])
    assert meter.usd == pytest.approx(2 * (2 * 600 + 2 * 36 + 18) / 3600)
    # Ray was started anew on a machine that is still rented.
    meter.observed(ran("two", "c"))
    assert meter.usd == pytest.approx(2 * (2 * 600 + 3 * 36 + 18) / 3600)
    # A node that was taken away before it could report anything.
    meter.lost(died("d", 54.0))
    assert meter.usd == pytest.approx(2 * (3 * 600 + 3 * 36 + 72) / 3600)
    # Nobody knows where: no further start.
    meter.lost(died(None, 36.0))
    assert meter.usd == pytest.approx(2 * (3 * 600 + 4 * 36 + 72) / 3600)
    spent, priced = meter.text()
    for part in ("spent: $1.12", "108 s", "3 starts", "(10 min, assumed)"):
        assert part in spent
    for part in ("pit b spot in here at $2.00/h", "cheapest", "idle nodes"):
        assert part in priced


def test_a_budget_counts_faults_before_a_bucket_has_them(run: RunFolder) -> None:
    """A sweep plans its next round while the last faults wait to be sent."""
    run.storage = S3Storage(URL, LATER)
    with ObservationWriter(run) as writer:
        journal = RunJournal(run, writer, RATES)
        session = SweepSession(run, writer, SPEC, RATES)
        executor = TrialExecutor(session, CLUSTER, journal, wait_seconds=60, budget_usd=1.0)
        journal.record_fault(died("a", 3600.0))
        assert executor.spent_usd == pytest.approx(2 * (600 + 3600) / 3600)


def test_nodes_cost_the_offers_that_the_user_names() -> None:
    """The cheapest match applies; without a match there is no price, and a warning says so."""
    on_demand = NodePrices(CATALOG, NodeRentals(offers=OfferFilter(market="on-demand")))
    meter = Meter(SPEC, on_demand, [ran("one", "a")])
    assert meter.usd == pytest.approx(3 * 636 / 3600)
    priced = list(meter.text())[1]
    assert "on-demand in here at $3.00" in priced
    assert "cheapest" not in priced
    none = NodePrices(CATALOG, NodeRentals(offers=OfferFilter(providers=("own",))))
    assert Meter(SPEC, none, [ran("one", "a")]).usd is None
    meter = Meter(SPEC, none, [ran("one", "a"), observation(1, cell=DESK, seconds=3600.0)])
    spent, priced = meter.text()
    assert spent == "spent: $0.50: probes"
    assert "fast not at all" in priced
    assert "own c on-demand" in priced
    assert "idle nodes" not in priced


def test_a_labelled_node_is_priced_by_its_labels() -> None:
    """Other nodes do not affect it; a label without a price falls back to the user's choice."""
    labelled = NodeRental(instance="a", region="here", market="on-demand")
    gone = NodeRental(instance="x", market="on-demand")
    unpriced = NodeRental(instance="a", region="here", market="spot")
    nodes = [
        Node({"CPU": 1.0, "fast": 1.0}, node_id="a", labels={"other": "1"} | labelled.labels),
        Node({"CPU": 1.0, "fast": 1.0}, node_id="b", labels={"other": "1"}),
        Node({"CPU": 1.0, "fast": 1.0}, node_id="c", labels=gone.labels),
        Node({"CPU": 1.0, "fast": 1.0}, node_id="d", labels=unpriced.labels),
    ]
    rented = NodeRentals().with_nodes(nodes)
    assert rented.nodes == {"a": labelled, "c": gone, "d": unpriced}
    assert rented.with_nodes(nodes[:1]) is rented
    rates = NodePrices(CATALOG, rented)
    offers = {node_id: rates.offer("fast", node_id) for node_id in "abcd"}
    instances = {key: offer and offer.instance for key, offer in offers.items()}
    assert instances == {"a": "a", "b": "b", "c": "b", "d": "a"}
    meter = Meter(SPEC, rates, [ran("one", "a"), ran("two", "b")])
    assert meter.usd == pytest.approx(5 * 636 / 3600)
    assert {e.offer and e.offer.instance: e.nodes for e in meter.spent} == {"a": 1, "b": 1}


def test_a_price_never_underestimates_a_labelled_node() -> None:
    """On demand in the same region comes before spot elsewhere; other providers never match."""
    rows = [
        ("east", "small", "spot", 1.0),
        ("west", "small", "on-demand", 4.0),
        ("west", "large", "on-demand", 9.0),
    ]
    offers = [
        CATALOG.offers("fast")[0].model_copy(
            update={
                "region": r,
                "instance": i,
                "market": m,
                "usd_per_hour": usd,
                "provider": "hill",
            }
        )
        for r, i, m, usd in rows
    ]

    def nearest(**labels: str) -> str:
        rental = NodeRental.model_validate({"provider": "hill", **labels})
        near = rental.nearest([*CATALOG.offers("fast"), *offers])
        return "" if near is None else f"{near.region} {near.instance} {near.market}"

    assert nearest(instance="small", region="west", market="spot") == "west small on-demand"
    assert nearest(instance="small", region="east", market="spot") == "east small spot"
    assert nearest(instance="small", region="east", market="on-demand") == "west small on-demand"
    assert nearest(instance="huge", region="west", market="on-demand") == "west small on-demand"
    assert nearest(provider="moon", instance="small", region="west") == ""


def test_an_assumed_price_is_reported_as_the_cheapest_offer() -> None:
    """This holds where one of two nodes has labels; a future node is priced like that one."""
    labelled = NodeRental(provider="pit", instance="a", region="here", market="on-demand")
    rates = NodePrices(CATALOG, NodeRentals(nodes={"a": labelled}))
    offers = [rates.offer("fast", node_id) for node_id in (None, "a", "b")]
    assert [offer and offer.instance for offer in offers] == ["a", "a", "b"]
    assert "cheapest" not in rates.text([("fast", offers[1])])
    assert "cheapest" in rates.text([("fast", offer) for offer in offers])


def test_a_node_offer_is_saved_again_after_a_full_disk(tmp_path: Path) -> None:
    """Until the disk has room, no price depends on an offer that was not saved."""
    run = open_run(tmp_path / "run", ONE_CELL, spec_of())
    labelled = NodeRental(provider="pit", instance="a", region="here", market="on-demand")
    cluster = ClusterResources((Node({"CPU": 1.0}, node_id="a", labels=labelled.labels),))
    in_the_way = tmp_path / "run" / RENTED / "file"
    in_the_way.mkdir(parents=True)
    with ObservationWriter(run) as writer:
        diary = RunJournal(run, writer, NodePrices(CATALOG))
        with pytest.raises(StoreError):
            diary.record_nodes(cluster)
        in_the_way.rmdir()
        in_the_way.parent.rmdir()
        diary.record_nodes(cluster)
    assert run.rented() == diary.rates.rented == NodeRentals(nodes={"a": labelled})


def test_the_offers_of_nodes_are_saved_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweep, plan, status and a resumed sweep use the same prices."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    text = ONE_CELL.replace("[cpu]", "[fast]") + ROWS
    run = open_run(tmp_path / "run", text, spec_of(text))
    spec = tmp_path / "made.yaml"
    spec.write_text(text, encoding="utf-8")
    with ObservationWriter(run) as writer:
        for observation in whole_trial(FAST, SPEC, largest=40):
            writer.append(observation)
    sweep = ["sweep", str(spec), "--out", str(run.path)]
    assert main([*sweep, "--providers", "pit", "--no-spot"]) == 0
    price = "on-demand in here at $3.00/h"
    assert price in capsys.readouterr().err
    assert run.rented() == NodeRentals(offers=OfferFilter(providers=("pit",), market="on-demand"))
    for command in (["status", str(run.path)], sweep, [*sweep[:1], "--resume", *sweep[2:]]):
        assert main(command) == 0
        assert price in "".join(capsys.readouterr())
    assert main([*sweep, "--providers", "pitt", "--dry-run"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("--providers: ")
    assert "did you mean 'pit'?" in errors


def test_a_gpu_whose_start_exceeds_the_budget_is_excluded() -> None:
    """The budget goes to the first cells of the plan; the user's own machine starts free."""
    plan = make_plan(SPEC, CATALOG, CLUSTER, [])

    def placed(budget_usd: float | None, spent_usd: float = 0.0) -> set[str]:
        strategy = ExhaustiveStrategy(SPEC, RATES, budget_usd)
        return {cell.gpu for cell in strategy.wanted(plan, [], spent_usd)}

    start = 2.0 * 600 / 3600  # dollars
    assert placed(None) == {"fast", "desk", "cpu"}
    assert placed(1.1 * start) == {"fast", "desk", "cpu"}
    assert placed(0.9 * start) == {"desk", "cpu"}
    assert placed(1.1 * start, spent_usd=0.2 * start) == {"desk", "cpu"}
    assert placed(2.0, spent_usd=2.0) == {"cpu"}


def test_a_trial_that_did_not_finish_is_not_excluded_by_the_budget() -> None:
    """Only cells without budget are excluded for it; the others did not finish."""
    plan = make_plan(SPEC, CATALOG, CLUSTER, [])
    probes = [observation(1, cell=DESK, seconds=7200.0)]
    spent_usd = Meter(SPEC, RATES, probes).usd or 0.0
    finished = ExhaustiveStrategy(SPEC, RATES, 1000.0).conclusion(plan, probes, spent_usd)
    assert "3 trials" in (finished.failure or "")
    assert finished.unpaid == ()
    unpaid = ExhaustiveStrategy(SPEC, RATES, 1.0).conclusion(plan, probes, spent_usd)
    assert unpaid.failure is None
    assert len(unpaid.unpaid) == 3


def test_strict_starts_nothing_when_a_trial_would_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The skipped cells of a GPU have one line, and no run folder is created."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    spec = tmp_path / "made.yaml"
    text = ONE_CELL.replace("[cpu]", "[cpu, A40, L4]").replace("[16]", "[16, 32]")
    spec.write_text(text, encoding="utf-8")
    assert main(["sweep", str(spec), "--strict", "--out", str(tmp_path / "run")]) == 1
    messages = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in messages[:2]] == ["2 trials on A40", "2 trials on L4"]
    assert "--strict: 4 trials" in messages[2]
    assert not (tmp_path / "run").exists()


def test_a_plan_prices_gpus_that_are_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prices are known before anything is rented, apart from what this machine can run."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    spec = tmp_path / "made.yaml"
    spec.write_text(ONE_CELL.replace("[cpu]", "[cpu, A40]"), encoding="utf-8")
    assert main(["plan", str(spec)]) == 0
    here, there = capsys.readouterr().out.split("On a cluster with one node per GPU (A40; ")
    assert "expected cost: unknown" in here
    assert "| 1 to be started |" in there
    assert "0.38 h and $0." in there


@pytest.mark.long
def test_a_sweep_ends_when_its_budget_is_spent(tmp_path: Path) -> None:
    """On a real Ray at a dollar a second: observations are kept and excluded cells listed."""
    text = two_devices("paid", 3600, 3600)
    (tmp_path / "paid.yaml").write_text(text, encoding="utf-8")
    budget = 0.5
    done = ended(tmp_path, "sweep", "paid.yaml", "--out", "run", "--budget-usd", str(budget))
    assert done.returncode == 0, done.stderr
    probes = observations(tmp_path / "run")
    spent = sum(o.seconds for o in probes)
    longest = max(o.seconds for o in probes)
    assert budget <= spent <= budget + 2 * longest  # one runs on each device
    assert "budget of $0.5: " in done.stderr
    assert f"spent: ${spent:.3g}" in done.stderr
