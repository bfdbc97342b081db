"""Parameter counts worked out from an architecture, held against models built from it."""

import datetime as dt
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from observations import recipe, tiny_cell
from pydantic import ValidationError
from torch_process import small_steps

from trials.finetune import FineTuning
from trials.models.build import build_model
from trials.models.preset import (
    Architecture,
    BlackMambaArchitecture,
    LlamaArchitecture,
    MixtralArchitecture,
    Preset,
    UnknownModelError,
    preset_by_name,
    presets,
)
from trials.workload import Method

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

TINY = ("blackmamba-tiny", "llama-tiny", "mixtral-tiny")
TINY_METHODS = [
    (name, method)
    for name, method in product(TINY, ("full", "lora", "qlora"))
    if method in preset_by_name(name).architecture.methods
]

MIXTRAL_8X7B = MixtralArchitecture(
    family="mixtral",
    vocab_size=32000,
    hidden_size=4096,
    layers=32,
    attention_heads=32,
    key_value_heads=8,
    expert_width=14336,
    experts=8,
    active_experts=2,
)
BLACKMAMBA_2_8B = BlackMambaArchitecture(
    family="blackmamba",
    vocab_size=50304,
    hidden_size=1472,
    layers=36,
    state_size=16,
    conv_kernel=4,
    expand=2,
    expert_width=3872,
    experts=8,
    active_experts=2,
)
LLAMA_2_7B = LlamaArchitecture(
    family="llama",
    vocab_size=32000,
    hidden_size=4096,
    layers=32,
    attention_heads=32,
    key_value_heads=32,
    mlp_width=11008,
)
# Llama with key-value heads shared: the one place where its attention is not square.
LLAMA_3_8B = LlamaArchitecture(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    layers=32,
    attention_heads=32,
    key_value_heads=8,
    mlp_width=14336,
)
PUBLISHED = [MIXTRAL_8X7B, BLACKMAMBA_2_8B, LLAMA_2_7B, LLAMA_3_8B]


@pytest.fixture(scope="module", autouse=True)
def made_for_small_steps() -> Iterator[None]:
    """All of this file."""
    with small_steps():
        yield


def preset(architecture: Architecture) -> Preset:
    """An architecture that no file of ours names."""
    return Preset(
        name="any", source="test", recorded=dt.date(2026, 11, 20), architecture=architecture
    )


@pytest.mark.parametrize(("name", "method"), TINY_METHODS)
def test_a_built_model_has_the_parameters_its_preset_works_out(name: str, method: Method) -> None:
    """Total, trainable and 4-bit: counted in the model on one side, from the facts on the other."""
    of = recipe(method)
    tuning = FineTuning(tiny_cell(name, of), preset_by_name(name), seed=0)
    assert tuning.parameters() == preset_by_name(name).parameters(of)


def test_each_family_offers_the_methods_the_papers_use() -> None:
    """BlackMamba is trained whole; the other two with adapters as well."""
    assert [method for name, method in TINY_METHODS if name == "blackmamba-tiny"] == ["full"]
    assert len(TINY_METHODS) == 7


@pytest.mark.parametrize(
    ("architecture", "parameters", "within"),
    [
        (MIXTRAL_8X7B, 46.70e9, 0.005),
        (LLAMA_2_7B, 6.738e9, 0.005),
        (LLAMA_3_8B, 8.030e9, 0.005),
        # Its name is all that is published of the total; ungated experts would come to 2.0.
        (BLACKMAMBA_2_8B, 2.8e9, 0.02),
    ],
    ids=lambda value: getattr(value, "family", None),
)
def test_published_models_have_their_published_parameters(
    architecture: Architecture, parameters: float, within: float
) -> None:
    """The facts of a real configuration come to the number its authors state."""
    counts = preset(architecture).parameters(recipe("full"))
    assert counts.total == pytest.approx(parameters, rel=within)
    assert counts.trainable == counts.total


@pytest.mark.parametrize("architecture", PUBLISHED, ids=lambda facts: facts.family)
def test_models_of_published_size_are_built_as_worked_out(architecture: Architecture) -> None:
    """No rule holds for tiny sizes alone: the code builds the real ones too, without memory."""
    with torch.device("meta"):
        model = build_model(
            architecture, active_experts=architecture.active_experts, seed=0, seq_len=16
        )
    counts = preset(architecture).parameters(recipe("full"))
    assert sum(parameter.numel() for parameter in model.parameters()) == counts.total


def test_qlora_stores_every_linear_layer_of_mixtral_but_the_head_in_4_bits() -> None:
    """What is left in full precision is the embedding, the head and the norms."""
    counts = preset(MIXTRAL_8X7B).parameters(recipe("qlora"))
    embedding_and_head, norms = 2 * 32000 * 4096, (2 * 32 + 1) * 4096
    assert counts.total - counts.trainable - counts.four_bit == embedding_and_head + norms


def test_the_shipped_presets_are_found_by_the_names_of_their_files() -> None:
    """The tiny ones of each family are among them, in alphabetical order."""
    assert set(TINY) <= set(presets())
    assert list(presets()) == sorted(presets())
    assert all(preset_by_name(name).name == name for name in presets())


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("mixtral-tny", "'mixtral-tiny'"), ("LLAMA-TINY", "'llama-tiny'"), ("black", "'blackmamba")],
)
def test_an_unknown_model_is_an_error_with_near_matches(wrong: str, near: str) -> None:
    """A misspelt model never falls back to another."""
    with pytest.raises(UnknownModelError, match=f"unknown model '{wrong}': did you mean {near}"):
        preset_by_name(wrong)


def test_an_unknown_model_with_nothing_near_lists_the_known_ones() -> None:
    """The message alone is enough to correct the specification."""
    with pytest.raises(UnknownModelError, match=r"unknown model 'zzz'; known: .*mixtral-tiny"):
        preset_by_name("zzz")


def test_blackmamba_alternates_so_its_layers_are_even() -> None:
    """Half a pair of layers cannot be built, so it is refused as a fact."""
    with pytest.raises(ValidationError, match="layers"):
        BlackMambaArchitecture.model_validate(BLACKMAMBA_2_8B.model_dump() | {"layers": 35})
