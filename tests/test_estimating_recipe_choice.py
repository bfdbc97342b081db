"""The recipe that an estimate chooses, and the change that it names where nothing fits."""

import dataclasses
import datetime as dt
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from gpu_catalog.errors import UserError
from orchestrator.cli.main import main
from orchestrator.estimating.choosing.recipe_choice import best_recipes, origin_text
from orchestrator.estimating.estimate_records import Estimate
from orchestrator.pricing.offer_options import RentalOptions
from orchestrator.pricing.prices_in_use import PriceOptions
from orchestrator.reporting.estimate_tables import as_table
from orchestrator.request import request_of
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.recipe_choices import with_chosen_recipes
from orchestrator.running.sweep import SweepOptions, sweep_request
from orchestrator.spec.recipe_options import RecipeOptions, recipe_of
from orchestrator.spec.spec_file import SpecError, parse_spec
from trials.recipes.recipe import Recipe
from trials.records.model import find_model
from trials.records.observation import Outcome
from trials.simulation.simulated_cell import CONTEXT_BYTES, GIB
from trials.simulation.timing_model import EfficiencyConstants

Record = Callable[[str, object], None]  # pytest's record_property
TINY = {"model": "llama-tiny", "seq_len": 512}
NO_OPTIONS: dict[str, Any] = {"nodes": RentalOptions(), "prices": PriceOptions()}
TODAY = dt.date(2026, 11, 23)


def estimates(**options: Any) -> list[Estimate]:
    """Estimates of some options, the cheapest first."""
    return [row.estimate for row in orchestrator.estimate(**options)]


@pytest.mark.long
def test_a_recipe_that_trl_lacks_is_named_where_it_saves_much() -> None:
    """Its loss leaves room for a step without checkpointing, which TRL's may not."""
    options: dict[str, Any] = {"model": "qwen2.5-0.5b", "seq_len": 1024, "method": "lora"}

    def needed_gib(loss: str) -> float:
        recipe = {"loss": loss, "gradient_checkpointing": "off", "batch_size": 1}
        (row,) = estimates(**options, **recipe, gpu="A10")
        assert row.peak_gib_interval is not None
        return row.reserved_gib * row.peak_gib_interval.high / row.peak_gib

    usable = (needed_gib("cce") + needed_gib("chunked")) / 2
    (chosen,) = estimates(**options, gpu="A10", memory_gib=usable + CONTEXT_BYTES / GIB)
    assert chosen.options == "--gradient-checkpointing on"
    by_options = {recipe.options: recipe for recipe in chosen.alternatives}
    doubtful = by_options.pop("--gradient-checkpointing off")
    ((words, spared),) = by_options.items()
    assert words == "--gradient-checkpointing off --loss cce"
    assert (doubtful.surely_fits, spared.surely_fits) == (False, True)
    (with_room,) = estimates(**options, gpu="A10")
    assert not any("cce" in recipe.options for recipe in with_room.alternatives)


@pytest.mark.parametrize(
    ("options", "is_automatic"),
    [
        ({}, True),
        ({"method": "lora"}, True),
        ({"gradient_checkpointing": "on"}, False),
        ({"gradient_checkpointing": "on", "recipe": "auto"}, True),
        ({"defaults": "trl"}, False),
        ({"recipe": "paper-mixtral"}, False),
    ],
)
def test_a_recipe_is_chosen_on_request_or_without_more_than_a_method(
    options: dict[str, Any], *, is_automatic: bool
) -> None:
    """Command lines that state fields mean what they say."""
    assert request_of(RecipeOptions, options).is_automatic == is_automatic


def test_each_gpu_gets_the_cheapest_recipe_and_the_others_as_alternatives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lora and qlora, with and without checkpointing; another method is marked."""
    (chosen,) = estimates(**TINY, gpu="A40")
    assert chosen.price is not None
    usd = [chosen.price.usd, *(recipe.usd for recipe in chosen.alternatives)]
    methods = [chosen.method, *(recipe.method for recipe in chosen.alternatives)]
    for method in ("lora", "qlora"):
        of_method = [one for one, its in zip(usd, methods, strict=True) if its == method]
        assert of_method == sorted(of_method)
    tried = {chosen.options, *(recipe.options for recipe in chosen.alternatives)}
    assert tried == {
        f"--method {method} --gradient-checkpointing {switch}"
        for method in ("lora", "qlora")
        for switch in ("on", "off")
    }
    for recipe in chosen.alternatives:
        assert recipe.learns_alike == (recipe.method == chosen.method)
    words = str(chosen.options).split()
    assert main(["estimate", "--model", "llama-tiny", "--seq-len", "512", "--gpu", "A40"]) == 0
    shown = capsys.readouterr().out
    assert f"with {chosen.options}.\n" in shown
    assert "Runners-up" in shown
    same = ["estimate", "--model", "llama-tiny", "--seq-len", "512", "--gpu", "A40", *words]
    assert main([*same, "--json"]) == 0
    stated = json.loads(capsys.readouterr().out)
    assert (stated["recipe"], stated["price"]["usd"]) == (chosen.recipe, chosen.price.usd)
    assert (stated["options"], stated["alternatives"]) == (None, [])


@pytest.mark.parametrize(("share", "chosen"), [(0.951, "lora"), (0.949, "qlora")])
def test_quantised_weights_have_to_save_a_twentieth(share: float, chosen: str) -> None:
    """They approximate the model, so a saving that times may not tell apart is none."""
    of_method = {}
    for method, factor in (("lora", 1.0), ("qlora", share)):
        fields = {"method": method, "gradient_checkpointing": "off"}
        (row,) = orchestrator.estimate(**TINY, **fields, gpu="A40")
        assert row.estimate.price is not None
        price = row.estimate.price.model_copy(update={"usd": factor, "hours": factor})
        priced = row.estimate.model_copy(update={"price": price})
        of_method[method] = dataclasses.replace(row, estimate=priced)
    jobs = [(row.question, row.gpu) for row in of_method.values()]
    (best,) = best_recipes(jobs, lambda asked: [of_method[q.recipe.method] for q, _ in asked])
    assert best.estimate.method == chosen
    assert len(best.estimate.alternatives) == 1


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ({"precision": "bf16-mixed"}, True),
        ({"precision": "bf16-mixed", "gradient_checkpointing": "on"}, False),
        ({"precision": "bf16-mixed", "seq_len": "max"}, False),
        ({"precision": "bf16-mixed", "recipe": "auto"}, False),
        ({}, False),
    ],
)
def test_an_option_that_ends_the_search_over_checkpointing_says_so(
    options: dict[str, Any], *, is_said: bool
) -> None:
    """It may make the answer dearer, unlike what the option itself does."""
    recipe = recipe_of(RecipeOptions())
    (given := dict(options)).pop("seq_len", None)
    finds_seq_len = options.get("seq_len") == "max"
    text = origin_text(RecipeOptions(**given), recipe, finds_seq_len=finds_seq_len)
    said = "With --precision given, checkpointing is no longer searched: --recipe auto"
    assert (said in text) is is_said


def test_the_rule_of_a_choice_has_the_saving_of_qlora_where_both_are_tried() -> None:
    """A row of LoRA beside "the cheapest that fits" would contradict it."""
    recipe = recipe_of(RecipeOptions())
    for method, is_said in ((None, True), ("lora", False)):
        text = origin_text(RecipeOptions(method=method), recipe, finds_seq_len=False)
        assert ("(lora where qlora saves less than 5%)" in text) is is_said


def test_lora_with_frozen_weights_in_fp32_names_the_option_that_halves_them() -> None:
    """It keeps the choice of the other fields where there was one."""
    for options, said in (
        ({}, "--recipe auto --precision bf16-mixed halves them."),
        ({"gradient_checkpointing": "on"}, "loads them: --precision bf16-mixed halves them."),
        ({"precision": "bf16-mixed"}, ""),
    ):
        answered = orchestrator.estimate(**TINY, gpu="A40", method="lora", **options)
        text = as_table(answered.estimated, answered.question)
        assert ("Frozen weights are in fp32" in text) == bool(said)
        assert said in text


def test_stated_fields_are_never_changed() -> None:
    """The choice is among the rest, of which nothing is left here."""
    stated = {"method": "lora", "gradient_checkpointing": "on", "recipe": "auto"}
    (chosen,) = estimates(**TINY, gpu="A40", **stated)
    assert "checkpointed" in chosen.recipe
    assert (chosen.method, chosen.options, chosen.alternatives) == ("lora", None, ())


def test_where_a_stated_recipe_does_not_fit_the_change_that_does_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without checkpointing not one example fits; with it, training learns the same."""
    options = {"method": "lora", "gradient_checkpointing": "off", "memory_gib": 0.564}
    (estimate,) = estimates(**TINY, gpu="A40", **options)
    assert estimate.outcome is Outcome.OUT_OF_MEMORY
    (change,) = estimate.alternatives
    assert (change.options, change.learns_alike) == ("--gradient-checkpointing on", True)
    assert change.hours is not None
    assert change.reserved_gib <= estimate.usable_gib
    words = [f"--{n.replace('_', '-')}={value}" for n, value in options.items()]
    assert main(["estimate", "--model=llama-tiny", "--seq-len=512", "--gpu=A40", *words]) == 1
    assert f"With {change.options} " in capsys.readouterr().out


def test_a_smaller_micro_batch_keeps_the_effective_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The offered options are the whole change: with them the estimate is the offered one."""
    stated = {"method": "lora", "gradient_checkpointing": "on", "memory_gib": 0.6}
    (estimate,) = estimates(**TINY, gpu="A40", batch_size=64, **stated)
    assert estimate.outcome is Outcome.OUT_OF_MEMORY
    (change,) = estimate.alternatives
    assert change.learns_alike
    assert change.batch_size * change.micro_batches == 64
    words = [f"--{n.replace('_', '-')}={value}" for n, value in stated.items()]
    tiny = ["--model=llama-tiny", "--seq-len=512", "--gpu=A40"]
    assert main(["estimate", *tiny, *words, *change.options.split(), "--json"]) == 0
    followed = json.loads(capsys.readouterr().out)
    names = ("recipe", "batch_size", "micro_batches", "reserved_gib", "hours")
    assert [followed[name] for name in names] == [getattr(change, name) for name in names]


@pytest.fixture
def histogram(tmp_path: Path) -> Path:
    """Lengths of examples, most of them short."""
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,examples\n128,700\n300,200\n512,100\n", encoding="utf-8")
    return path


def test_runners_up_have_a_price_where_lengths_vary(histogram: Path) -> None:
    """They are compared without drawn lengths, and timed with the padding of their batches."""
    (chosen,) = estimates(model="llama-tiny", length_histogram=histogram, gpu="A40", method="lora")
    assert chosen.varying_reserved_gib is not None
    assert chosen.price is not None
    (other,) = chosen.alternatives
    assert other.usd is not None
    assert other.usd >= chosen.price.usd


@pytest.mark.long
def test_where_no_recipe_fits_data_the_length_that_does_is_named(histogram: Path) -> None:
    """Examples are truncated, which alters training."""
    smallest = {"method": "qlora", "gradient_checkpointing": "on", "precision": "bf16-mixed"}
    data = {"model": "llama-tiny", "length_histogram": histogram}
    (estimate,) = estimates(**data, gpu="A40", memory_gib=0.54, **smallest)
    assert estimate.outcome is Outcome.OUT_OF_MEMORY
    (change,) = estimate.alternatives
    assert (change.options, change.learns_alike) == ("--cutoff 128", False)
    assert change.hours is not None


def spec_text(recipe: str, block: str = "simulated_on: [A40]") -> str:
    """A sweep of the job that ``TINY`` is estimated for, with one recipe."""
    return (
        "name: mine\ngpus: [A40]\nworkload: {examples: 15000, epochs: 10}\ncells:\n"
        f"  - {{models: [llama-tiny], recipes: [{recipe}], seq_lens: [512], {block}}}\n"
    )


def test_a_sweep_measures_the_recipes_that_an_estimate_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has them on record: a later command chooses nothing, whatever it would choose now."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(spec_text("auto"), encoding="utf-8")
    (chosen,) = estimates(**TINY, gpu="A40")
    assert main(["plan", "mine.yaml"]) == 0
    planned = capsys.readouterr().out
    assert f"A40(simulated)/llama-tiny/{chosen.recipe}/dense/seq512" in planned
    assert all(other.options in planned for other in chosen.alternatives)
    assert main(["sweep", "mine.yaml"]) == 0
    run = RunFolder(tmp_path / "runs" / "mine")
    assert {o.cell.recipe.key for o in run.observations()} == {chosen.recipe}

    (choice,) = run.chosen_recipes()
    other = choice.model_copy(update={"recipe": Recipe(method="full")})
    (tmp_path / "runs" / "mine" / "recipes.json").write_text(f"[{other.model_dump_json()}]")
    request = sweep_request(SweepOptions(spec=Path("mine.yaml"), **NO_OPTIONS), TODAY)
    assert [cell.recipe.method for cell in request.spec.all_cells()] == ["full"]
    (tmp_path / "runs" / "mine" / "recipes.json").unlink()
    with pytest.raises(UserError, match="restore"):
        run.spec()


def test_the_chosen_recipe_of_a_measured_cell_keeps_the_stated_fields(tmp_path: Path) -> None:
    """Nothing is left to choose here. A smaller GPU that is stood in for has its own choice."""
    stated = "named: auto, method: lora, lora_rank: 8, gradient_checkpointing: true"
    text = spec_text(f"{{{stated}, max_grad_norm: null}}", "weights: random")
    spec = parse_spec(text.replace("workload", "as_if: [RTX-4090]\nworkload"), "mine.yaml")
    constants, folder = EfficiencyConstants(), RunFolder(tmp_path / "run")
    spec = with_chosen_recipes(spec, folder, spec.merged_catalog(), constants, TODAY)
    cells = spec.all_cells()
    assert [(cell.gpu, cell.device) for cell in cells] == [("A40", "A40"), ("RTX-4090", "A40")]
    for cell in cells:
        recipe = cell.recipe
        assert (recipe.method, recipe.lora_rank, recipe.max_grad_norm) == ("lora", 8, None)
        assert (recipe.gradient_checkpointing, recipe.precision) == (True, "fp32-mixed-load")


def test_a_recipe_is_left_to_be_chosen_only_where_a_simulation_can_choose() -> None:
    """Fields are checked like those of any recipe."""
    text = spec_text("auto, {named: auto, lora_rank: x, rank: 4}", "simulated_on: [cpu]")
    with pytest.raises(SpecError) as raised:
        parse_spec(text, "mine.yaml")
    lines = str(raised.value).splitlines()
    assert sum("only CUDA" in line for line in lines) == 2
    assert any("lora_rank" in line for line in lines)
    assert any("recipes[1].rank" in line for line in lines)


@pytest.mark.long
def test_where_nothing_fits_the_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The weights alone exceed the memory, whatever is changed."""
    tiny = ["estimate", "--model", "llama-tiny", "--seq-len", "512", "--gpu", "A40"]
    assert main([*tiny, "--memory-gib", "0.505", "--method", "qlora"]) == 1
    assert "No change that was tried makes the job fit" in capsys.readouterr().out


@pytest.mark.long
def test_8_billion_parameters_on_an_rtx_4090(record_property: Record) -> None:
    """QLoRA fits; LoRA does not unless its frozen weights are in bf16, which is offered."""
    start = time.monotonic()
    (chosen,) = estimates(model="llama-3.1-8b", seq_len=512, gpu="RTX-4090")
    assert (chosen.method, chosen.outcome) == ("qlora", Outcome.FITS)
    (lora,) = estimates(model="llama-3.1-8b", seq_len=512, gpu="RTX-4090", method="lora")
    assert lora.outcome is Outcome.OUT_OF_MEMORY
    (change,) = lora.alternatives
    assert "--precision bf16-mixed" in change.options
    assert not change.learns_alike
    record_property("seconds", time.monotonic() - start)


@pytest.mark.long
def test_an_h100_does_qlora_of_70_billion_parameters_with_checkpointing(
    tmp_path: Path, record_property: Record
) -> None:
    """It is the cheapest, without a request for checkpointing."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    config = {**find_model("llama-3.1-8b").config, **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    start = time.monotonic()
    gpus = "A40,A100-80GB-SXM,H100-SXM,H200-SXM"
    cheapest, *_ = estimates(model=str(tmp_path), seq_len=2048, method="qlora", gpu=gpus)
    assert (cheapest.gpu, cheapest.options) == ("H100-SXM", "--gradient-checkpointing on")
    record_property("seconds", time.monotonic() - start)


@pytest.mark.long
def test_mixtral_on_an_a40_needs_checkpointing(record_property: Record) -> None:
    """With experts in 4 bits, 2,048 tokens do not fit without it; the answer prices it with it."""
    start = time.monotonic()
    options = {"method": "qlora", "experts": "looped", "gpu": "A40"}
    options["gradient_checkpointing"] = "off"
    (estimate,) = estimates(model="mixtral-8x7b", seq_len=2048, **options)
    assert estimate.outcome is Outcome.OUT_OF_MEMORY
    (change,) = estimate.alternatives
    assert (change.options, change.learns_alike) == ("--gradient-checkpointing on", True)
    assert change.usd is not None
    record_property("seconds", time.monotonic() - start)
