"""``estimate`` as a user meets it: tables, JSON, explanations, and a line for each mistake."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fitting.points.batch_lengths import Lengths
from gpu_catalog.catalog import load_catalog
from orchestrator.cli.main import main
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.records.recipe import Recipe
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.trace_cache import Traces

TINY = ("estimate", "--model", "mixtral-tiny", "--seq-len", "32", "--method", "full")


# A job that is nothing but its steps.
AT_ONCE = (
    *("--startup-minutes", "0", "--checkpoint-seconds", "0"),
    *("--interruptions-per-day", "0"),
)


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of this file's tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cached(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No trace is made twice, and none left in the home directory."""
    with monkeypatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(shared_cache))
        yield


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON that the command prints."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_one_gpu_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """What a program reads: numbers with their intervals, and on what basis."""
    told = said(capsys, *TINY, "--gpu", "A40", "--batch-size", "8", *AT_ONCE)
    assert (told["model"], told["gpu"], told["method"]) == ("mixtral-tiny", "A40", "full")
    assert (told["seq_len"], told["batch_size"], told["basis"]) == (32, 8, "simulated")
    assert told["tokens_per_second"] == pytest.approx(8 * 32 / told["step_seconds"])
    assert told["examples_per_second"] == pytest.approx(8 / told["step_seconds"])
    for name in ("peak_gib", "step_seconds", "max_batch_size", "examples_per_second"):
        interval = told[f"{name}_interval"]
        assert interval["low"] <= told[name] <= interval["high"]
    assert 0 < told["peak_gib"] <= told["reserved_gib"] < told["usable_gib"]
    assert told["price"]["hours"] == pytest.approx(150_000 / 8 * told["step_seconds"] / 3600)


def test_every_gpu_is_a_line_the_cheapest_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Those without an offer last, those that cannot have bf16 told beside."""
    found = said(capsys, *TINY, "--batch-size", "8")
    priced = [each["price"]["usd"] for each in found if each["price"] is not None]
    assert priced == sorted(priced)
    assert [each["price"] is None for each in found] == sorted(
        each["price"] is None for each in found
    )
    assert main([*TINY, "--batch-size", "8"]) == 0
    shown = capsys.readouterr()
    assert "T4: precision bf16" in shown.err
    assert "Nothing was measured" in shown.out
    assert shown.out.count("| simulated |") == len(found)


def test_the_largest_batch_fits_and_the_next_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """By the allocator's own rules, on as little memory as is asked for."""
    memory = ("--gpu", "A40", "--memory-gib", "0.8")
    largest = said(capsys, *TINY, *memory)["max_batch_size"]
    at = said(capsys, *TINY, *memory, "--batch-size", str(largest))
    above = said(capsys, *TINY, *memory, "--batch-size", str(largest + 1))
    assert at["outcome"] == "FITS"
    assert above["outcome"] in ("OUT_OF_MEMORY", "THRASHING")
    assert above["step_seconds"] is None
    assert above["reserved_gib"] > above["usable_gib"] >= at["reserved_gib"]


def test_the_largest_batch_is_closed_from_both_sides() -> None:
    """Under limits near and far: it fits, and one above does not."""
    gpu, model = load_catalog().gpu("A40"), find_model("mixtral-tiny")
    recipe = with_defaults(Recipe(method="full"), model, gpu)
    cell = Cell(
        gpu="A40",
        simulated=True,
        model=model.name,
        recipe=recipe,
        experts=8,
        active_experts=2,
        seq_len=32,
    )
    simulated = SimulatedCell(cell, model, Traces())
    for limit_mib in (60, 85, 110, 160):
        limit = limit_mib * 2**20
        largest = simulated.largest_batch(gpu, limit, 4096)
        fit, miss = (simulated.without_limit(b, gpu) for b in (largest, largest + 1))
        assert fit.peak_reserved_bytes <= limit < miss.peak_reserved_bytes


def test_a_gpu_that_does_not_exist_has_memory_and_no_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody knows its speed."""
    told = said(capsys, *TINY, "--gpu", "X100", "--memory-gib", "100", "--batch-size", "4")
    assert told["usable_gib"] == pytest.approx(100 - 0.5)
    assert told["step_seconds"] is None
    assert told["price"] is None
    assert main([*TINY, "--gpu", "X100", "--memory-gib", "100", "--batch-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert "No time for X100: " in shown
    assert "bf16_dense_tflops" in shown


def test_a_gpu_of_other_memory_is_another_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """As fast as the one it is named for, and as long at the job; nobody offers it."""
    known, smaller = (
        said(capsys, *TINY, "--gpu", "A40", "--batch-size", "4", "--no-spot", *memory)
        for memory in ((), ("--memory-gib", "10"))
    )
    assert smaller["gpu"] == "A40-10GiB"
    assert smaller["usable_gib"] == pytest.approx(9.5)
    assert smaller["step_seconds"] == known["step_seconds"]
    assert (known["price"] is None, smaller["price"] is None) == (False, True)
    assert smaller["hours"] == known["hours"] == known["price"]["hours"]


def test_where_the_search_ends_is_no_limit_of_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of more memory than any GPU has."""
    endless = (*TINY, "--gpu", "A40", "--memory-gib", "1e9")
    told = said(capsys, *endless)
    assert told["max_batch_size"] == told["batch_limit"]
    assert main([*endless]) == 0
    shown = capsys.readouterr().out
    assert f"above {told['batch_limit']} " in shown
    assert "A40-1e+09GiB" in shown


def test_doubt_about_memory_leaves_what_fits_with_room(capsys: pytest.CaptureFixture[str]) -> None:
    """The least that the largest batch may be needs 6 % more, and nearly has it: so says a line."""
    told = said(capsys, *TINY, "--gpu", "A40", "--memory-gib", "8")
    interval = told["max_batch_size_interval"]
    assert 1 <= interval["low"] < told["max_batch_size"] < interval["high"]
    least = said(
        capsys, *TINY, "--gpu", "A40", "--memory-gib", "8", "--batch-size", f"{interval['low']:g}"
    )
    assert least["reserved_gib"] * 1.06 <= told["usable_gib"] * 1.005


def test_the_offer_is_the_cheapest_of_those_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    """By what the job costs on it, start-up and interruptions included."""
    asked = ("--gpu", "A100-80GB-SXM", "--batch-size", "8")
    anything, on_demand, of_aws = (
        said(capsys, *TINY, *asked, *wanted)["price"]
        for wanted in ((), ("--no-spot",), ("--providers", "aws", "--no-spot"))
    )
    assert anything["usd"] < on_demand["usd"] < of_aws["usd"]
    assert on_demand["market"] == "on-demand"
    assert of_aws["provider"] == "aws"
    nobody = [*TINY, "--gpu", "H100-NVL", "--batch-size", "8", "--providers", "verda"]
    assert main(nobody) == 0
    shown = capsys.readouterr().out
    assert "No price for H100-NVL: " in shown
    assert main([*TINY, "--gpu", "A40", *asked[2:], "--deadline", "0.01"]) == 0
    assert "deadline of 0.01 h" in capsys.readouterr().out
    told = said(capsys, *TINY, "--gpu", "A40", *asked[2:], "--budget-usd", "0.001")
    assert told["price"] is None
    assert "budget is $0.001" in told["no_price"]
    often = ("--interruptions-per-day", "24", "--spot")
    assert said(capsys, *TINY, *asked, *often)["price"]["hours"] > on_demand["hours"]


def test_a_data_set_tells_the_lengths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Memory is that of the longest example, the time that of batches as they are padded."""
    histogram = tmp_path / "lengths.csv"
    histogram.write_text("tokens,examples\n16,9990\n128,10\n", encoding="utf-8")
    asked = ("--method", "full", "--gpu", "A40", "--batch-size", "256", *AT_ONCE, "--epochs", "2")
    data = ("--length-histogram", str(histogram))
    told = said(capsys, *TINY[:3], *asked, *data)
    longest = said(capsys, *TINY[:3], *asked, "--seq-len", "128", "--examples", "10000")
    assert told["peak_gib"] == longest["peak_gib"]
    assert told["tokens_per_example"] == pytest.approx(16 + 112 * (1 - 0.999**256), rel=0.05)
    short = said(capsys, *TINY[:3], *asked, "--seq-len", str(round(told["tokens_per_example"])))
    assert told["step_seconds"] == short["step_seconds"] < longest["step_seconds"]
    assert told["price"]["hours"] == pytest.approx(2 * 10_000 / 256 * told["step_seconds"] / 3600)
    packed = said(capsys, *TINY[:3], *asked, *data, "--packing", "--cutoff", "128")
    assert packed["step_seconds"] == longest["step_seconds"]
    assert packed["price"]["hours"] < longest["price"]["hours"]
    seconds = packed["price"]["hours"] * 3600
    assert packed["examples_per_second"] == pytest.approx(2 * 10_000 / seconds)
    assert main([*TINY[:3], *data, "--seq-len", "16"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("--seq-len 16: ")
    assert "--cutoff 16" in message


# Slow, so that steps take as long as their tokens do, not as the host does.
SLOW = """\
gpus:
  - {key: SLOW, kind: cuda, device_names: [Slow], compute_capability: "8.6", multiprocessors: 84,
     usable_memory_bytes: 640000000, memory_bandwidth_gb_per_second: 1.0, bf16_dense_tflops: 0.01,
     fp16_dense_tflops: 0.01, fp32_tflops: 0.01, source: made up, recorded: 2026-11-20}
offers:
  - {gpu: SLOW, provider: own, region: office, instance: desk, usd_per_hour: 0.05,
     source: made up, recorded: 2026-11-20}
"""


def slow_gpu(tmp_path: Path) -> tuple[str, ...]:
    """A command on it."""
    (tmp_path / "mine.yaml").write_text(SLOW, encoding="utf-8")
    what = ("estimate", "--model", "llama-tiny", "--method", "full", "--gpu", "SLOW")
    return (*what, "--catalog", str(tmp_path / "mine.yaml"))


def test_where_examples_are_padded_the_fastest_batch_is_priced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of powers of two and the largest; with what the largest would lose, and what padding does."""
    (tmp_path / "lengths.csv").write_text("tokens,examples\n32,950\n512,50\n", encoding="utf-8")
    asked = (*slow_gpu(tmp_path), "--length-histogram", str(tmp_path / "lengths.csv"))
    told = said(capsys, *asked)
    assert (told["batch"], told["outcome"]) == ("fastest", "FITS")
    assert told["batch_size"] < told["max_batch_size"]
    sizes = [2**power for power in range(10) if 2**power < told["max_batch_size"]]
    hours = [
        said(capsys, *asked, "--batch-size", str(size))["price"]["hours"]
        for size in (*sizes, told["max_batch_size"])
    ]
    assert told["price"]["hours"] == min(hours) < hours[-1]
    largest, same = (said(capsys, *asked, "--batch-size", word) for word in ("max", "largest"))
    assert largest == same
    assert (largest["batch"], largest["price"]["hours"]) == ("largest", hours[-1])
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "1,000 examples x 10" in shown
    assert "default: --epochs)" in shown
    assert f"**${told['price']['usd']:.3g}**" in shown
    assert "own machine (desk)" in shown
    assert f"batch size {told['batch_size']}.\n" in shown
    listed = ", ".join(map(str, sizes))
    assert f"fastest of {listed} and" in shown
    steps = [(each - 1 / 6) for each in (min(hours), hours[-1])]  # without the start-up
    longer = float(shown.partition("steps would take ")[2].partition("%")[0])
    assert longer == pytest.approx(100 * (steps[1] / steps[0] - 1), abs=2)
    lengths = Lengths.of([(32, 950), (512, 50)])
    padding, grouped = (
        f"{1 - lengths.mean / tokens:.0%}"
        for tokens in (
            lengths.padded(told["max_batch_size"]),
            lengths.grouped(told["max_batch_size"], 1000),
        )
    )
    assert f" {padding} at " in shown
    assert "--group-by-length" in shown
    assert f" leaves {grouped} there; " in shown
    assert "--packing" in shown
    assert main([*asked, "--packing", "--cutoff", "512", "--batch-size", "1"]) == 0
    assert "Padding" not in capsys.readouterr().out


def test_without_data_the_largest_is_priced_and_the_fastest_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Which is no slower."""
    asked = (*slow_gpu(tmp_path), "--seq-len", "512", "--examples", "100")
    largest, fastest = (said(capsys, *asked, *more) for more in ((), ("--batch-size", "fastest")))
    assert (largest["batch"], largest["batch_size"]) == ("largest", largest["max_batch_size"])
    assert fastest["batch"] == "fastest"
    assert fastest["examples_per_second"] >= largest["examples_per_second"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "100 examples x 10" in shown
    assert "default: --epochs)" in shown
    assert "--batch-size fastest" in shown


def test_what_is_expected_decides_and_what_may_be_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of deadline and budget: kept surely, kept as expected, or by nothing, and what must give."""
    asked = (*TINY, "--gpu", "A40,H100-SXM", "--batch-size", "8", "--no-spot")
    prices = [each["price"] for each in said(capsys, *asked)]
    quickest = min(prices, key=lambda price: price["hours"])
    cheapest = prices[0]

    def shown(*more: object) -> str:
        assert main([*asked, *map(str, more)]) == 0
        return capsys.readouterr().out

    assert "--examples, --epochs)" in shown()
    between = (cheapest["usd"] + cheapest["usd_interval"]["high"]) / 2
    sure = shown("--deadline", 10000)
    assert "deadline of 10000 h" in sure
    assert "exceeds" not in sure
    unsure = shown("--budget-usd", between)
    assert f"budget of ${between:g}, but" in unsure
    assert f"${between:g}: H100-SXM ($" in unsure
    assert f"{cheapest['usd_interval']['high']:.3g}) ! |" in unsure
    assert "\n! the 90 % interval" in unsure
    none = shown("--deadline", 0.001)
    assert "deadline of 0.001 h" in none
    assert f"take {quickest['hours']:.3g} h, on " in none
    assert "Rent" not in none
    both = shown("--deadline", 1000, "--budget-usd", between)
    assert "deadline of 1000 h" in both
    assert f"budget of ${between:g}, but" in both
    assert f"budget of ${between:g}." in both
    assert f"cost ${cheapest['usd']:.3g}, on " in shown("--budget-usd", 0.001)


def test_a_batch_that_fits_nowhere_tells_what_is_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the largest that does fit."""
    assert main([*TINY, "--gpu", "A40", "--memory-gib", "0.8", "--batch-size", "1024"]) == 0
    shown = capsys.readouterr().out
    assert "A40-0.8GiB" in shown
    assert "lacks " in shown
    assert "largest batch size" in shown


def test_programs_get_a_list_though_no_gpu_can_do_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Where they asked for several."""
    assert main([*TINY, "--gpu", "T4,V100-16GB-SXM", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == []
    assert "T4: precision bf16" in shown.err


def test_what_is_explained_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    """What fills the memory, and where the time goes, to the last part."""
    assert main([*TINY, "--gpu", "A40", "--batch-size", "8", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "weights" in shown
    assert "optimizer state" in shown
    assert "waits for the host" in shown
    _, memory, time = shown.split("share |\n")
    for table in (memory, time):
        parts = [row.split("|")[-2] for row in table.splitlines() if row.startswith("| ")]
        shares = [float(part.strip(" %")) for part in parts if part.strip().endswith("%")]
        assert sum(shares) == pytest.approx(100, abs=0.5)
    told = said(capsys, *TINY, "--gpu", "A40", "--batch-size", "8", "--explain")
    for name, parts in told["explained"].items():
        assert list(parts.values()) == sorted(parts.values(), reverse=True)
        assert sum(parts.values()) == pytest.approx(told[name], rel=1e-3)


def test_experts_that_get_more_than_their_share_take_more_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Median and 95th percentile over draws; half of them are above an equal share, or nearly."""
    looped = ("--experts", "looped", "--gpu", "A40", "--batch-size", "64")
    told = said(capsys, *TINY, *looped, "--routing-draws", "4")
    median, upper = told["routed_peak_gib"]
    assert told["peak_gib"] * 0.98 < median <= upper < told["peak_gib"] * 1.2
    assert main([*TINY, *looped, "--routing-draws", "4"]) == 0
    assert "drawn shares" in capsys.readouterr().out
