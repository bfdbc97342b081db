"""Models by configuration: presets with published sizes, folders, hub names and mistakes."""

import json
from pathlib import Path

import pytest
from builders.observations import FULL, cpu

from trials.models.build import stock_model
from trials.records.compatibility import with_defaults
from trials.records.model import Model, UnknownModelError, find_model, presets

FULL_SIZE = (
    "blackmamba-2.8b",
    "deepseek-v2-lite",
    *("gemma-3-12b", "gemma-3-1b", "gemma-3-27b", "gemma-3-4b", "gemma-4-31b"),
    *("gpt-oss-120b", "gpt-oss-20b", "granite-4.0-h-small"),
    *("llama-3.2-1b", "llama-3.2-3b", "mistral-small-24b", "moonlight-16b-a3b"),
    *("olmo-3-32b", "olmo-3-7b", "phi-4", "qwen3-0.6b", "qwen3-1.7b", "qwen3-14b"),
    *("qwen3-32b", "qwen3-8b", "qwen3-next-80b-a3b", "smollm3-3b"),
    "llama-2-13b",
    "llama-2-7b",
    "llama-3.1-70b",
    "llama-3.1-8b",
    *("mistral-7b", "mistral-7b-v0.3", "mistral-nemo-12b", "mixtral-8x7b"),
    "olmoe-1b-7b",
    *(f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")),
    "qwen3-30b-a3b",
    "qwen3-4b",
)
TINY = ("blackmamba-tiny", "llama-tiny", "mixtral-tiny", "olmoe-tiny", "qwen3-moe-tiny")


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    """Built on the meta device: within 0.5 %, or within the rounding of the published figure."""
    model = find_model(name)
    assert model.published_parameters is not None
    assert model.published_in is not None
    stock = stock_model(model, with_defaults(FULL, model, cpu()), model.active_experts)
    assert all(parameter.is_meta for parameter in stock.parameters())
    counted = sum(parameter.numel() for parameter in stock.parameters())
    allowed = max(0.005 * model.published_parameters, (model.published_rounding or 0) / 2)
    assert counted == pytest.approx(model.published_parameters, abs=allowed)
    if model.published_rounding is None:
        assert counted == model.published_parameters


def test_presets_are_found_by_name_in_order_and_each_names_its_source() -> None:
    """Every shipped preset is listed in these tests."""
    assert tuple(presets()) == tuple(sorted((*FULL_SIZE, *TINY)))
    assert all(find_model(name) is preset for name, preset in presets().items())
    assert all("config.json" in p.source or "2402.01771" in p.source for p in presets().values())


def test_the_papers_other_name_for_blackmamba_means_the_same_model() -> None:
    """630M counts the active parameters per token, 2.8B the trained ones."""
    assert find_model("blackmamba-630m") is find_model("blackmamba-2.8b")


@pytest.mark.parametrize(
    ("name", "experts", "active", "attention", "mamba"),
    [
        ("llama-2-7b", None, None, True, False),
        ("mixtral-8x7b", 8, 2, True, False),
        ("qwen3-30b-a3b", 128, 8, True, False),
        ("olmoe-1b-7b", 64, 8, True, False),
        ("blackmamba-2.8b", 8, 2, False, True),
    ],
)
def test_experts_attention_and_mamba_come_from_the_configuration(
    name: str, experts: int | None, active: int | None, *, attention: bool, mamba: bool
) -> None:
    """The names of the fields differ between model families."""
    model = find_model(name)
    facts = (model.experts, model.active_experts, model.has_attention, model.has_mamba)
    assert facts == (experts, active, attention, mamba)


def test_another_number_of_active_experts_is_set_in_the_configuration() -> None:
    """Sparse and dense variants differ in one field only."""
    model = find_model("mixtral-tiny")
    assert model.config_with(8) == model.config | {"num_experts_per_tok": 8}
    assert model.config_with(None) == model.config


def folder(path: Path, **config: object) -> str:
    """Write a folder with a config.json."""
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    """Any causal language model of transformers is read from its own file."""
    name = folder(tmp_path, **find_model("olmoe-tiny").config)
    model = find_model(name)
    assert (model.name, model.weights) == (name, name)
    assert (model.experts, model.active_experts) == (16, 4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, "its configuration has no vocab_size"),
        (
            {"model_type": "gemma3n", "audio_config": {}, "vocab_size": 8},
            r"gemma3n reads more than text and images \(audio_config\), which is not estimated",
        ),
        ({"vocab_size": 8}, "its configuration has no model_type"),
        (
            {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}},
            "a gemma4 without a vision tower is its language model: give its text_config",
        ),
        (
            {"model_type": "x", "vocab_size": 8, "n_routed_experts": 4},
            "has experts but not how many are active",
        ),
        (
            {"model_type": "x", "vocab_size": 8, "num_experts": "four"},
            "num_experts is 'four'",
        ),
        ({"model_type": "x", "vocab_size": 8, "n_layer": 1_000_000}, "n_layer is 1000000"),
        (
            {"model_type": "x", "vocab_size": 8, "hidden_size": 10**9},
            "hidden_size is 1000000000: at most 10000000 are read",
        ),
        ({"model_type": "x", "vocab_size": 8, "n_inner": 10**15}, "n_inner is 1000000000000000"),
        (
            {"model_type": "x", "vocab_size": 8, "parts": [{"ffn_dim": 10**8}]},
            "ffn_dim is 100000000",
        ),
        (
            {"model_type": "x", "vocab_size": 8, "num_experts": 9999, "moe_k": 1},
            "9999 experts",
        ),
        (
            {"model_type": "x", "vocab_size": 8, "num_experts": 2, "num_experts_per_tok": 8},
            "routes a token to 8 of 2 experts: it must be 1 to 2",
        ),
        (
            {"model_type": "x", "vocab_size": 8, "num_experts": 8, "num_experts_per_tok": 0},
            "routes a token to 0 of 8 experts",
        ),
    ],
)
def test_an_invalid_configuration_is_one_line(
    config: dict[str, object], reason: str, tmp_path: Path
) -> None:
    """The line names the file."""
    name = folder(tmp_path, **config)
    with pytest.raises(UnknownModelError, match=reason) as error:
        find_model(name)
    assert f"{tmp_path}/config.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unreadable_configuration_is_one_line(tmp_path: Path) -> None:
    """The file is absent, or not JSON."""
    with pytest.raises(UnknownModelError, match=r"config\.json: no such file"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UnknownModelError, match="is not JSON"):
        find_model(str(tmp_path))
    for levels in (200, 100_000):
        deep = f'{{"a": {"[" * levels + "]" * levels}}}'
        (tmp_path / "config.json").write_text(deep, encoding="utf-8")
        with pytest.raises(UnknownModelError, match=r"json is nested more than 200 levels deep$"):
            find_model(str(tmp_path))


def test_a_folder_that_looks_like_a_hub_name_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at once, without a request to the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "small").mkdir(parents=True)
    folder(tmp_path / "mine" / "small", **find_model("olmoe-tiny").config)
    with pytest.raises(UnknownModelError, match=r"is a folder here: write \./mine/small"):
        find_model("mine/small")
    assert find_model("./mine/small").weights == "./mine/small"


def test_an_unknown_name_has_suggestions() -> None:
    """The error also lists the other ways to name a model."""
    with pytest.raises(UnknownModelError, match=r"unknown model 'mixtral-8x7'.*mixtral-8x7b"):
        find_model("mixtral-8x7")
    with pytest.raises(UnknownModelError, match="a hub name"):
        find_model("zzz")


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what works without a network: a file, or a preset."""
    from huggingface_hub import constants  # noqa: PLC0415 - what it read from the environment

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    near = r"no config\.json from the hub.*--model-config.*Similar presets: .*llama-3\.1-8b"
    with pytest.raises(UnknownModelError, match=near) as error:
        find_model("nobody/Llama-3.5-9B")
    assert "\n" not in str(error.value)


def test_a_model_needs_a_vocabulary() -> None:
    """A preset without one is refused too."""
    with pytest.raises(ValueError, match="no vocab_size"):
        Model(name="x", source="me", config={"model_type": "llama"})


def test_lengths_and_numbers_of_tokens_are_no_sizes() -> None:
    """Some publishers write the largest number there is for a length without a limit."""
    config = {**find_model("llama-tiny").config, "model_max_length": 10**30, "rope_theta": 10**8}
    assert Model(name="x", source="me", config=config).vocab_size == 1024
