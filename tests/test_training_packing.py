"""Packed rows: the inputs of TRL's collator, no attention across examples, refusals."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import cpu, tiny_cell
from builders.rankings import JOB, TEXT, limit_probes, ranked, timed
from builders.runs import spec_of
from torch.nn import functional

from fitting.points.packed_rows import PACKED_AT_ONCE, best_fit_rows, rows_per_example
from gpu_catalog.catalog import load_catalog
from orchestrator.cli.main import main
from orchestrator.datasets.lengths import DataLengths
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import job_of, padded_tokens, rows
from trials.models.fused_head import IGNORED
from trials.recipes.recipe import Recipe
from trials.records.compatibility import impossible_on_model, with_defaults
from trials.records.model import find_model
from trials.simulation.recording import OperatorClass
from trials.simulation.trace_cache import StepTrace, joined
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.whole_step import Steps
from trials.training.finetune import FineTuning
from trials.training.loss import batch_loss
from trials.training.recipe_check import departures
from trials.training.tasks.batch import TaskBatch
from trials.training.tasks.packing import packed_inputs, packed_labels

MODEL = find_model("llama-tiny")
GPU = load_catalog().gpu("A100-80GB-SXM")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_check:FutureWarning")


def packed(attention: str = "sdpa", **fields: Any) -> Recipe:
    """A recipe that packs three examples into a row."""
    stated = {"method": "full", "precision": "fp32", "packing": True, "examples_per_row": 3}
    return Recipe.model_validate(stated | {"attention": attention} | fields)


def test_inputs_are_those_of_trls_collator() -> None:
    """Two rows of 11 tokens: examples of 3, 3 and 5 tokens."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: PLC0415 - seconds

    tokens = torch.arange(22).reshape(2, 11)
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    expected = collator([{"input_ids": row, "seq_lengths": [3, 3, 5]} for row in tokens.tolist()])
    inputs = packed_inputs(tokens, 3)
    inputs["labels"] = packed_labels(tokens, inputs["position_ids"])
    assert inputs.keys() == expected.keys()
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[name])
            assert value.dtype == expected[name].dtype
        else:
            assert value == expected[name]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_examples_of_a_row_train_as_they_would_apart(attention: str) -> None:
    """The loss is the mean over the tokens of examples that do not see one another."""
    recipe = with_defaults(packed(attention), MODEL, cpu())
    cell = tiny_cell(MODEL.name, recipe, seq_len=12)
    tuning = FineTuning(cell, MODEL, device=torch.device("cpu"), seed=0)
    built = tuning.built()
    assert built.separates_examples
    assert not departures(recipe, built, tuning.implied())
    alone = built.model_copy(update={"separates_examples": False})
    assert departures(recipe, alone, tuning.implied())
    tokens = tuning.tokens(2)
    with torch.no_grad():
        loss = batch_loss(tuning.model, TaskBatch(tokens, tokens), recipe)
        logits = tuning.model(input_ids=tokens.reshape(6, 4)).logits[:, :-1]
    apart = functional.cross_entropy(logits.flatten(0, 1), tokens.reshape(6, 4)[:, 1:].flatten())
    assert loss.item() == pytest.approx(apart.item(), rel=1e-5)
    assert IGNORED not in tokens


@pytest.mark.parametrize("attention", ["flash_attention_2", *long_cases(("sdpa", "eager"))])
def test_few_batch_sizes_determine_all_others(attention: str) -> None:
    """A mask of all pairs of tokens needs a third; the varlen kernel needs no mask."""
    recipe = with_defaults(packed(attention, precision="bf16"), MODEL, GPU)
    cell = tiny_cell(MODEL.name, recipe, seq_len=96)
    request = TraceRequest(cell=cell, model=MODEL)
    assert len(request.batch_sizes) == (2 if attention == "flash_attention_2" else 3)
    traceable = TraceableCell(cell, MODEL, whole=True)

    def trace(batch_size: int) -> StepTrace:
        traced = traceable.trace(batch_size, lambda _: 0)
        return StepTrace((batch_size,), (traced.recording,), traced.held, traced.copies)

    steps = Steps(joined([trace(size) for size in request.batch_sizes]))
    for batch_size in (3, 9):
        alone = Steps(trace(batch_size))
        assert np.array_equal(steps.storages(batch_size)[1], alone.storages(batch_size)[1])
        numbers = steps.operators(batch_size).in_full.numbers
        assert np.allclose(numbers, alone.operators(batch_size).in_full.numbers)


def test_only_the_varlen_kernel_computes_less_for_more_examples() -> None:
    """Its FLOPs are the sum of the squares of the lengths; a mask hides scores after the fact."""
    flops = {}
    for attention in ("sdpa", "flash_attention_2"):
        for examples in (2, 8):
            recipe = packed(attention, precision="bf16", examples_per_row=examples)
            cell = tiny_cell(MODEL.name, with_defaults(recipe, MODEL, GPU), seq_len=64)
            traced = TraceableCell(cell, MODEL, whole=True).trace(2, lambda _: 0)
            trace = StepTrace((2,), (traced.recording,), traced.held, traced.copies)
            works = Steps(trace).operators(2).in_full
            of_attention = works.names // 4 == OperatorClass.ATTENTION_FORWARD
            flops[attention, examples] = works.numbers[of_attention, 1].sum()
    assert flops["sdpa", 8] == flops["sdpa", 2]
    assert flops["flash_attention_2", 8] == flops["flash_attention_2", 2] / 4


@pytest.mark.parametrize("longest", [64, 200])
def test_rows_are_those_of_trls_packing(longest: int) -> None:
    """Of best-fit decreasing on the same examples."""
    from datasets import Dataset  # noqa: PLC0415 - seconds
    from trl import pack_dataset  # noqa: PLC0415 - as above

    draw = random.Random(longest)
    lengths = [min(100, draw.randint(1, longest)) for _ in range(PACKED_AT_ONCE)]
    examples = Dataset.from_dict({"input_ids": [[1] * length for length in lengths]})
    expected = len(pack_dataset(examples, 100, "bfd"))
    assert best_fit_rows(lengths, 100) == expected
    histogram = tuple(sorted({n: lengths.count(n) for n in lengths}.items()))
    assert rows_per_example(histogram, 100) == expected / len(lengths)


def test_a_job_has_the_rows_of_the_recipe() -> None:
    """Rows hold whole examples; without lengths, as many of them as the recipe states."""
    recipe = packed()
    without = job_of(Job(examples=9, epochs=1), recipe, 30)
    assert (rows(without), padded_tokens(without, 4, 30)) == (3, 30)
    data = DataLengths(source="made", histogram=((20, 50), (70, 50)))
    job = job_of(Job(examples=200, epochs=1, lengths=data), recipe, 100)
    assert (rows(job), padded_tokens(job, 4, 100)) == (100, 90)  # one of each in a row
    assert job_of(job, Recipe(method="full"), 100) is job


def test_a_ranking_prices_packed_rows() -> None:
    """A cell whose recipe packs takes as many steps as there are rows, at its full length."""
    text = TEXT.replace("[desk, lap, attic]", "[desk]").replace("[16]", "[128]")
    spec = spec_of(text.replace("precision: fp32", "precision: fp32, packing: true"))
    (cell,) = spec.all_cells()
    observations = [*limit_probes(8, cell), timed(8, *6 * [0.1], cell=cell)]
    data = DataLengths(source="made", histogram=((32, 500), (64, 500)))
    row = ranked(observations, JOB.model_copy(update={"lengths": data}), spec=spec).offers[0]
    assert row.tokens_per_example == 128
    assert row.hours * 3600 == pytest.approx(3 * 375 / 8 * 0.1)


def test_models_whose_layers_ignore_positions_are_refused() -> None:
    """A scan's state would run on from example to example."""
    recipe = Recipe(method="full", packing=True)
    assert "packing" in (impossible_on_model(recipe, find_model("blackmamba-tiny")) or "")
    assert impossible_on_model(recipe, MODEL) is None


def test_examples_per_row_needs_packing() -> None:
    """One example in a row is not packed."""
    with pytest.raises(ValueError, match="packing"):
        Recipe(method="full", examples_per_row=2)
    with pytest.raises(ValueError, match="examples_per_row"):
        Recipe(method="full", packing=True, examples_per_row=1)


def test_an_estimate_with_packing_takes_fewer_hours(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """Of varied lengths; the output states rows and examples."""
    histogram = tmp_path / "lengths.csv"
    histogram.write_text("tokens,examples\n32,900\n256,100\n", encoding="utf-8")
    options = ["estimate", "--model", "llama-tiny", "--gpu", "A40", "--method", "full"]
    options += ["--length-histogram", str(histogram), "--batch-size", "8"]
    rowed = [*options, "--packing", "--seq-len", "256", "--attention", "flash_attention_2"]
    assert main([*options, "--json"]) == 0
    padded = json.loads(capsys.readouterr().out)
    assert main([*rowed, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    hours = {name: one["price"]["hours"] for name, one in (("rows", row), ("padded", padded))}
    assert hours["rows"] < hours["padded"]
    assert row["recipe"].endswith("packed5")
    assert main(rowed) == 0
    shown = capsys.readouterr().out
    assert "1,000 examples" in shown
    assert "213 rows" in shown
