"""``estimate`` as a user meets it: tables, JSON, explanations, and one line per mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fitting.points.batch_lengths import Lengths
from gpu_catalog.number_text import given
from orchestrator.cli.main import main

TINY = (
    *("estimate", "--model", "mixtral-tiny", "--seq-len", "32", "--method", "full"),
    *("--gradient-accumulation", "1"),  # else the batch is part of an assumed effective batch
)
# A job that is nothing but its steps.
AT_ONCE = (
    *("--startup-minutes", "0", "--checkpoint-seconds", "0"),
    *("--interruptions-per-day", "0"),
)


def estimate_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """JSON that the command prints."""
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_json_of_one_gpu_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """The object has numbers with their intervals, and their basis."""
    estimate = estimate_json(capsys, *TINY, "--gpu", "A40", "--batch-size", "8", *AT_ONCE)
    assert (estimate["model"], estimate["gpu"], estimate["method"]) == (
        "mixtral-tiny",
        "A40",
        "full",
    )
    assert (estimate["seq_len"], estimate["batch_size"], estimate["basis"]) == (32, 8, "simulated")
    assert estimate["tokens_per_second"] == pytest.approx(8 * 32 / estimate["step_seconds"])
    assert estimate["examples_per_second"] == pytest.approx(8 / estimate["step_seconds"])
    for name in ("peak_gib", "step_seconds", "max_batch_size", "examples_per_second"):
        interval = estimate[f"{name}_interval"]
        assert interval["low"] <= estimate[name] <= interval["high"]
    assert 0 < estimate["peak_gib"] <= estimate["reserved_gib"] < estimate["usable_gib"]
    assert estimate["price"]["hours"] == pytest.approx(30_000 / 8 * estimate["step_seconds"] / 3600)


def test_json_has_the_job_that_was_priced(capsys: pytest.CaptureFixture[str]) -> None:
    """What was assumed is named; the age of the prices in use stands beside the JSON."""
    options = ("--gpu", "L4", "--batch-size", "8", "--epochs", "2", "--providers", "aws")
    assert main([*TINY, *options, "--startup-minutes", "7", "--json"]) == 0
    out, err = capsys.readouterr()
    estimate = json.loads(out)
    assert [estimate[name] for name in ("examples", "epochs", "effective_batch")] == [10_000, 2, 8]
    assert estimate["assumed"] == ["--examples"]
    assert estimate["overheads"]["startup_minutes"] == 7
    price = estimate["price"]
    assert (price["price_as_of"], price["price_recorded"]) == ("2026-02-01", "2026-11-20")
    assert "Prices: shipped table, 2025-04-01 to " in err


def test_gpus_are_ordered_by_cost_and_incompatible_ones_are_excluded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GPUs without an offer come last; those without the grouped product are excluded."""
    estimates = estimate_json(capsys, *TINY, "--batch-size", "8")
    priced = [row["price"]["usd"] for row in estimates if row["price"] is not None]
    assert priced == sorted(priced)
    assert [row["price"] is None for row in estimates] == sorted(
        row["price"] is None for row in estimates
    )
    assert main([*TINY, "--batch-size", "8"]) == 0
    shown = capsys.readouterr()
    assert "T4: experts grouped" in shown.err
    assert "Nothing was measured" in shown.out
    assert shown.out.count("| simulated |") == len(estimates)


def test_the_largest_batch_fits_and_the_next_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """At the given memory the largest batch size fits and the next one exceeds it."""
    memory = ("--gpu", "A40", "--memory-gib", "0.8")
    largest = estimate_json(capsys, *TINY, *memory)["max_batch_size"]
    at = estimate_json(capsys, *TINY, *memory, "--batch-size", str(largest))
    above = estimate_json(capsys, *TINY, *memory, "--batch-size", str(largest + 1), code=1)
    assert at["outcome"] == "FITS"
    assert above["outcome"] in ("OUT_OF_MEMORY", "THRASHING")
    assert above["step_seconds"] is None
    assert above["reserved_gib"] > above["usable_gib"] >= at["reserved_gib"]


def test_a_hypothetical_gpu_has_a_memory_estimate_and_no_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without the GPU's speed there is neither a step time nor a price."""
    estimate = estimate_json(
        capsys, *TINY, "--gpu", "X100", "--memory-gib", "100", "--batch-size", "4"
    )
    assert estimate["usable_gib"] == pytest.approx(100 - 0.5)
    assert estimate["step_seconds"] is None
    assert estimate["price"] is None
    assert main([*TINY, "--gpu", "X100", "--memory-gib", "100", "--batch-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert "No time for X100: " in shown
    assert "bf16_dense_tflops" in shown


def test_a_gpu_with_changed_memory_is_a_different_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """It is as fast as the original, but no provider offers it."""
    original, smaller = (
        estimate_json(capsys, *TINY, "--gpu", "A40", "--batch-size", "4", "--no-spot", *memory)
        for memory in ((), ("--memory-gib", "10"))
    )
    assert smaller["gpu"] == "A40-10GiB"
    assert smaller["usable_gib"] == pytest.approx(9.5)
    assert smaller["step_seconds"] == original["step_seconds"]
    assert (original["price"] is None, smaller["price"] is None) == (False, True)
    assert smaller["hours"] == original["hours"] == original["price"]["hours"]


def test_the_search_limit_is_not_reported_as_a_memory_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With more memory than any GPU has, the search ends at its own limit and says so."""
    endless = (*TINY, "--gpu", "A40", "--memory-gib", "1e9")
    estimate = estimate_json(capsys, *endless)
    assert estimate["max_batch_size"] == estimate["batch_limit"]
    assert main([*endless]) == 0
    shown = capsys.readouterr().out
    assert f"above {estimate['batch_limit']} " in shown
    assert "A40-1e+09GiB" in shown


def test_the_interval_of_the_largest_batch_covers_the_memory_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the lower end, memory still fits if it is at the upper end of its interval."""
    estimate = estimate_json(capsys, *TINY, "--gpu", "A40", "--memory-gib", "8")
    interval = estimate["max_batch_size_interval"]
    assert 1 <= interval["low"] < estimate["max_batch_size"] < interval["high"]
    least = estimate_json(
        capsys, *TINY, "--gpu", "A40", "--memory-gib", "8", "--batch-size", f"{interval['low']:g}"
    )
    error = estimate["memory_error"]
    assert least["reserved_gib"] * error["high"] <= estimate["usable_gib"] * 1.005
    ends = [estimate["peak_gib"] * error[end] for end in ("low", "high")]
    assert [*estimate["peak_gib_interval"].values()] == pytest.approx(ends)


def test_the_priced_offer_is_the_cheapest_that_meets_the_constraints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cost includes start-up and interruptions."""
    options = ("--gpu", "A100-80GB-SXM", "--batch-size", "8")
    anything, on_demand, of_aws = (
        estimate_json(capsys, *TINY, *options, *wanted)["price"]
        for wanted in ((), ("--no-spot",), ("--providers", "aws", "--no-spot"))
    )
    assert anything["usd"] < on_demand["usd"] < of_aws["usd"]
    assert on_demand["market"] == "on-demand"
    assert of_aws["provider"] == "aws"
    nobody = [*TINY, "--gpu", "H100-NVL", "--batch-size", "8", "--providers", "verda"]
    assert main(nobody) == 0
    shown = capsys.readouterr().out
    assert "No price for H100-NVL: " in shown
    assert re.search(
        r"^H100-NVL takes .* at batch size 8\. No price is known: ", shown, re.MULTILINE
    )
    assert main([*TINY, "--gpu", "A40", *options[2:], "--deadline", "0.01"]) == 1
    assert "deadline of 0.01 h" in capsys.readouterr().out
    poor = ("--gpu", "A40", *options[2:], "--budget-usd", "0.001")
    estimate = estimate_json(capsys, *TINY, *poor, code=1)
    assert estimate["price"] is None
    assert "budget is $0.001" in estimate["no_price"]
    often = ("--interruptions-per-day", "24", "--spot")
    assert estimate_json(capsys, *TINY, *options, *often)["price"]["hours"] > on_demand["hours"]


def test_a_length_histogram_sets_memory_time_and_price(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The longest example sets the memory; padded batches set the time."""
    histogram = tmp_path / "lengths.csv"
    histogram.write_text("tokens,examples\n16,9990\n128,10\n", encoding="utf-8")
    options = ("--method", "full", "--gpu", "A40", "--batch-size", "256", *AT_ONCE, "--epochs", "2")
    data = ("--length-histogram", str(histogram))
    estimate = estimate_json(capsys, *TINY[:3], *options, *data)
    longest = estimate_json(capsys, *TINY[:3], *options, "--seq-len", "128", "--examples", "10000")
    assert estimate["peak_gib"] == longest["peak_gib"]
    assert estimate["tokens_per_example"] == pytest.approx(16 + 112 * (1 - 0.999**256), rel=0.05)
    length = str(round(estimate["tokens_per_example"]))
    short = estimate_json(capsys, *TINY[:3], *options, "--seq-len", length)
    assert estimate["step_seconds"] == short["step_seconds"] < longest["step_seconds"]
    hours = 2 * 10_000 / 256 * estimate["step_seconds"] / 3600
    assert estimate["price"]["hours"] == pytest.approx(hours)
    packing = ("--packing", "--cutoff", "128", "--attention", "flash_attention_2")
    packed = estimate_json(capsys, *TINY[:3], *options, *data, *packing)
    assert packed["price"]["hours"] < longest["price"]["hours"]
    step, rate = packed["step_seconds"], packed["examples_per_second"]
    assert rate * packed["price"]["hours"] == pytest.approx(2 * 10_000 / 3600)
    assert 1 < packed["examples_per_row"] == pytest.approx(rate * step / 256)
    assert main([*TINY[:3], *data, "--seq-len", "16"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("--seq-len 16: ")
    assert "--cutoff 16" in message


# Slow, so that steps take as long as their tokens do, not as the host does.
SLOW = """\
gpus:
  - {key: SLOW, kind: cuda, device_names: [Slow], compute_capability: "8.6", multiprocessors: 84,
     usable_memory_bytes: 720000000, memory_bandwidth_gb_per_second: 1.0, bf16_dense_tflops: 0.01,
     fp16_dense_tflops: 0.01, fp32_tflops: 0.01, source: made up, recorded: 2026-11-20}
offers:
  - {gpu: SLOW, provider: own, region: office, instance: desk, usd_per_hour: 0.05,
     source: made up, recorded: 2026-11-20}
"""


def slow_gpu(tmp_path: Path) -> tuple[str, ...]:
    """``estimate`` on a GPU so slow that tokens, not the host, set the step time."""
    (tmp_path / "mine.yaml").write_text(SLOW, encoding="utf-8")
    what = ("estimate", "--model", "llama-tiny", "--method", "full", "--defaults", "plain")
    return (*what, "--gpu", "SLOW", "--catalog", str(tmp_path / "mine.yaml"))


@pytest.mark.long
def test_with_padding_the_fastest_batch_size_is_priced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is the fastest of the powers of two and the largest; the text gives padding's cost."""
    (tmp_path / "lengths.csv").write_text("tokens,examples\n32,950\n512,50\n", encoding="utf-8")
    options = (*slow_gpu(tmp_path), "--length-histogram", str(tmp_path / "lengths.csv"))
    estimate = estimate_json(capsys, *options)
    assert (estimate["batch"], estimate["outcome"]) == ("fastest", "FITS")
    surviving = estimate["surviving_batch_size"]
    assert estimate["batch_size"] < surviving <= estimate["max_batch_size"]
    reserved = estimate["varying_reserved_gib"]
    assert estimate["peak_gib"] < reserved["low"] <= reserved["high"] < estimate["usable_gib"]
    sizes = [2**power for power in range(10) if 2**power < surviving]
    hours = [
        estimate_json(capsys, *options, "--batch-size", str(size))["price"]["hours"]
        for size in (*sizes, surviving)
    ]
    assert estimate["price"]["hours"] == min(hours) < hours[-1]
    largest, same = (
        estimate_json(capsys, *options, "--batch-size", word) for word in ("max", "largest")
    )
    assert largest == same
    assert (largest["batch"], largest["price"]["hours"]) == ("largest", hours[-1])
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert "1,000 examples x 3" in shown
    assert "assumed: --epochs)" in shown
    assert f"**${estimate['price']['usd']:.3g}**" in shown
    assert "own machine (desk)" in shown
    assert f"batch size {estimate['batch_size']}.\n" in shown
    listed = ", ".join(map(str, sizes))
    assert f"fastest of {listed} and" in shown
    start_up_hours = 1 / 6
    steps = [total - start_up_hours for total in (min(hours), hours[-1])]
    longer = float(shown.partition("steps would take ")[2].partition("%")[0])
    assert longer == pytest.approx(100 * (steps[1] / steps[0] - 1), abs=2)
    lengths = Lengths.of([(32, 950), (512, 50)])
    padding, grouped = (
        f"{1 - lengths.mean / tokens:.0%}"
        for tokens in (
            lengths.padded(estimate["max_batch_size"]),
            lengths.grouped(estimate["max_batch_size"], 1000),
        )
    )
    assert f" {padding} at " in shown
    assert "--group-by-length" in shown
    assert f" leaves {grouped} there; " in shown
    assert "--packing" in shown
    assert main([*options, "--packing", "--cutoff", "512", "--batch-size", "1"]) == 0
    assert "Padding" not in capsys.readouterr().out


def test_without_data_the_largest_is_priced_and_the_fastest_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The fastest batch size is at least as fast as the largest."""
    options = (*slow_gpu(tmp_path), "--seq-len", "512", "--examples", "100")
    largest, fastest = (
        estimate_json(capsys, *options, *more) for more in ((), ("--batch-size", "fastest"))
    )
    assert (largest["batch"], largest["batch_size"]) == ("largest", largest["max_batch_size"])
    assert fastest["batch"] == "fastest"
    assert fastest["examples_per_second"] >= largest["examples_per_second"]
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert "100 examples x 3" in shown
    assert "assumed: --epochs)" in shown
    assert "--batch-size fastest" in shown
    assert "same length" in shown


def test_expected_cost_decides_and_an_exceeded_interval_is_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A limit is kept surely, kept as expected, or kept by no GPU; the last names the nearest."""
    options = (*TINY, "--gpu", "A40,H100-SXM", "--batch-size", "8", "--no-spot")
    prices = [row["price"] for row in estimate_json(capsys, *options)]
    quickest = min(prices, key=lambda price: price["hours"])
    cheapest = prices[0]

    def shown(*more: object, code: int = 0) -> str:
        assert main([*options, *map(str, more)]) == code
        return capsys.readouterr().out

    assert "--examples, --epochs)" in shown()
    between = (cheapest["usd"] + cheapest["usd_interval"]["high"]) / 2
    sure = shown("--deadline", 10000)
    assert "deadline of 10,000 h" in sure
    assert "exceeds" not in sure
    unsure = shown("--budget-usd", between)
    assert f"budget of ${given(between)}, but" in unsure
    assert f"${given(between)}: H100-SXM ($" in unsure
    assert f"{cheapest['usd_interval']['high']:.3g}) ! |" in unsure
    assert "\n! the 90 % interval" in unsure
    none = shown("--deadline", 0.001, code=1)
    assert "deadline of 0.001 h" in none
    assert f"take {quickest['hours']:.3g} h, on " in none
    assert "Give a longer --deadline or more GPUs (--gpus 2,4,8)." in none
    assert "Rent" not in none
    both = shown("--deadline", 1000, "--budget-usd", between)
    assert "deadline of 1,000 h" in both
    assert f"budget of ${given(between)}, but" in both
    assert f"budget of ${given(between)}." in both
    assert f"cost ${cheapest['usd']:.3g}, on " in shown("--budget-usd", 0.001, code=1)


def test_a_batch_that_does_not_fit_shows_the_missing_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The text gives the missing memory and the largest batch size that fits."""
    assert main([*TINY, "--gpu", "A40", "--memory-gib", "0.8", "--batch-size", "1024"]) == 1
    shown = capsys.readouterr().out
    assert "A40-0.8GiB" in shown
    assert "GiB more" in shown
    assert "largest batch size" in shown


def test_json_of_several_incompatible_gpus_is_an_empty_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A request for several GPUs always prints a list."""
    assert main([*TINY, "--gpu", "T4,V100-16GB-SXM", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == []
    assert "T4: experts grouped" in shown.err


def test_explained_shares_add_up_to_100_percent(capsys: pytest.CaptureFixture[str]) -> None:
    """The parts of memory and of time sum to the whole."""
    explained = (*TINY, "--defaults", "plain", "--gpu", "A40", "--batch-size", "8", "--explain")
    assert main(explained) == 0
    shown = capsys.readouterr().out
    assert "weights" in shown
    assert "optimizer state" in shown
    assert "waits for the host" in shown
    _, memory, time = shown.split("share |\n")
    for table in (memory, time):
        parts = [row.split("|")[-2] for row in table.splitlines() if row.startswith("| ")]
        shares = [float(part.strip(" %")) for part in parts if part.strip().endswith("%")]
        assert sum(shares) == pytest.approx(100, abs=0.5)
    estimate = estimate_json(capsys, *explained)
    for name, parts in estimate["explained"].items():
        assert list(parts.values()) == sorted(parts.values(), reverse=True)
        assert sum(parts.values()) == pytest.approx(estimate[name], rel=1e-6)


@pytest.mark.long
def test_uneven_routing_takes_more_memory_than_equal_shares(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The median over draws is close to equal shares, the 95th percentile above it."""
    looped = ("--experts", "looped", "--gpu", "A40", "--batch-size", "64")
    estimate = estimate_json(capsys, *TINY, *looped, "--routing-draws", "4")
    median, upper = estimate["routed_peak_gib"]
    assert estimate["peak_gib"] * 0.98 < median <= upper < estimate["peak_gib"] * 1.2
    assert main([*TINY, *looped, "--routing-draws", "4"]) == 0
    assert "random expert routings" in capsys.readouterr().out


def test_an_estimate_is_written_as_a_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batch, epochs and tokens are those of the estimate, and its offer is the first."""
    path = tmp_path / "task.yaml"
    job = ("--gpu", "H100-SXM", "--batch-size", "8", "--epochs", "2")
    assert main([*TINY, *job, "--export", str(path), "--to", "skypilot"]) == 0
    assert str(path) in capsys.readouterr().out
    price = estimate_json(capsys, *TINY, *job)["price"]
    task = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert task["resources"]["ordered"][0]["instance_type"] == price["instance"]
    for option in ("per_device_train_batch_size 8", "num_train_epochs 2", "max_length 32"):
        assert f"--{option} " in task["run"]
