"""Every family of transformers is traced as its recipe says, or refused by name in one line."""

from itertools import product
from typing import Any

import pytest
import torch
from builders.families import (
    FAMILIES,
    GPU,
    METHODS,
    MOST_USED,
    UNSHRINKABLE,
    cell_of,
    refusal_of,
    tiny_model,
)
from builders.long_cases import long_cases
from builders.observations import cpu, recipe
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from trials.models.build import stock_model
from trials.models.weight_placement import QuantisationError, quantise_laid_out
from trials.recipes.fields import Method
from trials.recipes.recipe import Recipe
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.tracing_worker import Tracing
from trials.training.finetune import FineTuning
from trials.training.recipe_check import RecipeError, departures

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of families about their configurations
]


QUICK = ("llama", "gemma2")


def not_called(*_: object) -> Any:
    """Values of quantised experts, which these recipes do not have."""
    raise AssertionError


@pytest.mark.parametrize(
    "family", [*QUICK, *long_cases(name for name in MOST_USED if name not in QUICK)]
)
def test_the_most_used_families_are_traced_as_the_recipe_says(family: str) -> None:
    """All three methods take hold, but for 4 bits with the layers of Falcon."""
    model = tiny_model(family)
    assert model is not None
    refused = {method: refusal_of(model, recipe(method, precision="bf16")) for method in METHODS}
    line = refused.pop("qlora")
    assert set(refused.values()) == {None}
    assert (line is not None and "FalconLinear" in line) == (family == "falcon")
    assert line is None or family == "falcon"


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in UNSHRINKABLE])
def test_every_family_is_traced_as_the_recipe_says_or_refused(family: str, method: Method) -> None:
    """No family raises any other exception than a refusal in one line that names it."""
    model = tiny_model(family)
    if model is None:
        pytest.skip("its configuration has no vocabulary of its own, which reading it refuses")
    line = refusal_of(model, recipe(method, precision="bf16"))
    assert line is None or (family in line and "\n" not in line)


@pytest.mark.parametrize("family", MOST_USED)
def test_4_bit_layers_are_those_of_transformers(family: str) -> None:
    """The conversion of transformers replaces the same linear layers of the stock model."""
    model = tiny_model(family)
    assert model is not None
    settings = with_defaults(recipe("qlora", precision="bf16", attention="eager"), model, GPU)

    def stock() -> torch.nn.Module:
        return stock_model(model, settings, model.active_experts)

    def four_bit(converted: torch.nn.Module) -> set[str]:
        kinds = ((name, type(part).__name__) for name, part in converted.named_modules())
        return {name for name, kind in kinds if kind == "Linear4bit"}

    theirs, ours = stock(), stock()
    replace_with_bnb_linear(
        theirs, get_keys_to_not_convert(theirs), BitsAndBytesConfig(load_in_4bit=True)
    )
    if family == "falcon":
        assert four_bit(theirs) == set()
        with pytest.raises(QuantisationError, match="FalconLinear"):
            quantise_laid_out(ours, settings, lambda *_: None, not_called)
        return
    quantise_laid_out(ours, settings, lambda *_: None, not_called)
    assert four_bit(ours) == four_bit(theirs)
    assert four_bit(ours)


@pytest.mark.parametrize(
    "gpt2_recipe",
    [*map(recipe, METHODS), recipe("qlora", quantisation="int8")],
    ids=lambda settings: settings.key,
)
def test_gpt2_trains_in_every_method(gpt2_recipe: Recipe) -> None:
    """Its linear layers hold transposed matrices, which adapters and quantisation take alike."""
    model = tiny_model("gpt2")
    assert model is not None
    settings = with_defaults(gpt2_recipe, model, cpu())
    tuning = FineTuning(cell_of(model, settings, "cpu"), model, device=torch.device("cpu"), seed=0)
    tokens = tuning.tokens(2)
    assert tuning.step(tokens) > tuning.step(tokens) > 0
    built = tuning.built()
    assert departures(settings, built, tuning.implied()) == []
    assert built.quantisation == ((settings.quantisation,) if settings.quantisation else ())


MIXED = [
    recipe("full", precision="bf16-mixed"),
    recipe("lora", precision="fp32-mixed-load"),
    recipe("lora", precision="bf16", adapter_dtype="fp32"),
    recipe("qlora", precision="bf16-mixed", kbit_preparation=True, gradient_checkpointing=True),
    recipe("qlora", precision="bf16", adapter_dtype="fp32", attention="flash_attention_2"),
    recipe("qlora", precision="bf16-mixed", quantisation="int8", kbit_preparation=True),
    recipe("qlora", precision="bf16", quantisation="fp4"),
]


MOE = ("mixtral-tiny", "qwen3-moe-tiny")
QUICK_MIXED = (("mixtral-tiny", MIXED[0]), ("qwen3-moe-tiny", MIXED[5]))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *QUICK_MIXED,
        *long_cases(case for case in product(MOE, MIXED) if case not in QUICK_MIXED),
    ],
    ids=lambda part: getattr(part, "key", part),
)
def test_precisions_take_hold_on_experts_under_the_trace(name: str, settings: Recipe) -> None:
    """Autocast, adapters of their own dtype, and norms cast up are as the recipe says."""
    assert refusal_of(find_model(name), settings) is None


def test_a_trace_refuses_a_recipe_that_did_not_take_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are not quantised are an error that names the counts, as in a trial."""
    model = tiny_model("llama")
    assert model is not None
    monkeypatch.setattr("trials.simulation.tracing.fake_model.quantise_laid_out", lambda *_: None)
    settings = with_defaults(recipe("qlora", precision="bf16"), model, GPU)
    with pytest.raises(RecipeError, match=r"four_bit parameters: .* has 0"):
        Tracing().trace(TraceRequest(cell=cell_of(model, settings), model=model))
