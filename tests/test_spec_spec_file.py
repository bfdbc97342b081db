"""Specifications as they are read: shipped sweeps, cells, recipes and the user's own GPUs."""

import itertools
import json
from pathlib import Path

import pytest
from builders.runs import ONE_CELL, ROUTED, SIMULATED, spec_of
from builders.specifications import altered

from orchestrator.run_folder.run_folder import open_run
from orchestrator.spec.spec_file import SpecError, named_spec_text, parse_spec, shipped_specs


def test_default_sweep_is_valid_and_holds_three_families_on_the_cpu() -> None:
    """The sweep that runs when none is given: small ones here, then the paper's, simulated."""
    cells = parse_spec(shipped_specs()["laptop"], "the default").all_cells()
    assert [cell.simulated for cell in cells] == 12 * [False] + 32 * [True]
    assert {(c.gpu, c.model, c.active_experts, c.seq_len) for c in cells if c.simulated} == set(
        itertools.product(
            ("A40", "A100-40GB-SXM", "A100-80GB-SXM", "H100-SXM"),
            ("mixtral-8x7b", "blackmamba-2.8b"),
            (2, 8),
            (80, 176),
        )
    )
    assert [cell.key for cell in cells if not cell.simulated] == [
        "cpu/mixtral-tiny/qlora-r8-experts+router-bf16-adapters-fp32-checkpointed-looped-clip1-router-loss/2of8/seq32",
        "cpu/mixtral-tiny/qlora-r8-experts+router-bf16-adapters-fp32-checkpointed-looped-clip1-router-loss/2of8/seq64",
        "cpu/mixtral-tiny/qlora-r8-experts+router-bf16-adapters-fp32-checkpointed-looped-clip1-router-loss/8of8/seq32",
        "cpu/mixtral-tiny/qlora-r8-experts+router-bf16-adapters-fp32-checkpointed-looped-clip1-router-loss/8of8/seq64",
        "cpu/blackmamba-tiny/full-fp32-checkpointed-grouped-clip1/2of8/seq32",
        "cpu/blackmamba-tiny/full-fp32-checkpointed-grouped-clip1/2of8/seq64",
        "cpu/blackmamba-tiny/full-fp32-checkpointed-grouped-clip1/8of8/seq32",
        "cpu/blackmamba-tiny/full-fp32-checkpointed-grouped-clip1/8of8/seq64",
        "cpu/llama-tiny/lora-r8-all-linear-fp32-checkpointed-clip1/dense/seq32",
        "cpu/llama-tiny/lora-r8-all-linear-fp32-checkpointed-clip1/dense/seq64",
        "cpu/llama-tiny/lora-r8-all-linear-fp32-checkpointed-clip1/dense/seq64/2xfsdp2",
        "cpu/llama-tiny/lora-r8-all-linear-fp32-checkpointed-clip1/dense/seq64/4xfsdp2",
    ]


def test_cells_are_the_product_of_a_blocks_axes_on_every_gpu() -> None:
    """A model with experts that are not mentioned has its own routing."""
    text = altered("[llama-tiny]", "[llama-tiny, mixtral-tiny]")
    text = altered("[16]", "[16, 8]", altered("[cpu]", "[cpu, A40]", text))
    assert [cell.key for cell in spec_of(text).all_cells()] == [
        f"{gpu}/{model}/seq{length}"
        for gpu in ("cpu", "A40")
        for model in ("llama-tiny/full-fp32/dense", "mixtral-tiny/full-fp32-grouped/2of8")
        for length in (16, 8)
    ]


@pytest.mark.parametrize("name", shipped_specs())
def test_shipped_sweeps_are_valid_and_named_after_themselves(name: str) -> None:
    """Each can be asked for by its name, and no cell of it is impossible on its model."""
    spec = parse_spec(shipped_specs()[name], name)
    assert spec.name == name
    assert spec.all_cells()


def test_recipes_can_be_named_and_changed() -> None:
    """A paper's recipe, and the same with another attention kernel."""
    text = altered("{method: full, precision: fp32}", NAMED, ROUTED)
    keys = [cell.recipe.key for cell in spec_of(text).all_cells()]
    stem = "qlora-r16-experts+router-bf16-checkpointed"
    assert keys == [f"{stem}-flash_attention_2-looped", f"{stem}-looped"]


NAMED = "paper-mixtral, {named: paper-mixtral, attention: sdpa}"


def test_alias_and_name_of_a_model_are_the_same_cell() -> None:
    """630M are the active parameters of the model of 2.8B."""
    text = altered("llama-tiny", "blackmamba-630m")
    assert [cell.model for cell in spec_of(text).all_cells()] == ["blackmamba-2.8b"]


def test_smaller_gpus_are_found_on_every_larger_one_of_their_kind() -> None:
    """After the GPUs' own cells; a GPU with less memory cannot stand in."""
    text = altered("[cpu]", "[A100-80GB-SXM, A40, cpu]\nas_if: [A40, L4]")
    cells = [(cell.gpu, cell.capped_on) for cell in spec_of(text).all_cells()]
    assert cells == [
        ("A100-80GB-SXM", None),
        ("A40", None),
        ("cpu", None),
        ("A40", "A100-80GB-SXM"),
        ("L4", "A100-80GB-SXM"),
        ("L4", "A40"),
    ]


def test_models_folder_may_be_gone_when_the_run_is_read_again(tmp_path: Path) -> None:
    """The run folder keeps what the specification meant."""
    config = {"model_type": "llama", "vocab_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = altered("llama-tiny", str(tmp_path))
    run = open_run(tmp_path / "run", text, spec_of(text))
    (tmp_path / "config.json").unlink()
    with pytest.raises(SpecError, match="no such file"):
        spec_of(text)
    (cell,) = run.spec().all_cells()
    assert (cell.model, run.spec().model(cell.model).vocab_size) == (str(tmp_path), 8)


def test_own_gpus_and_prices_join_the_catalog() -> None:
    """A user's rows can be swept and priced."""
    rows = """\
catalog:
  gpus:
    - {key: mine, kind: cpu, usable_memory_bytes: 9, source: me, recorded: 2026-01-31}
  offers:
    - {gpu: mine, provider: me, region: here, instance: desk, usd_per_hour: 1, source: me,
       recorded: 2026-01-31}
"""
    spec = spec_of(altered("[cpu]", "[mine]") + rows)
    catalog = spec.merged_catalog()
    assert (spec.gpus, catalog.gpu("mine").usable_memory_bytes) == (("mine",), 9)
    assert [offer.instance for offer in catalog.offers("mine")] == ["desk"]


# What is changed, and what is told: for each mistake its line, its place, and words that it needs.


def test_a_misspelt_shipped_sweep_has_a_near_match() -> None:
    """The name that was probably meant is in the error."""
    with pytest.raises(SpecError, match="'paper'"):
        named_spec_text(Path("papr"))


@pytest.mark.parametrize("name", ["all-gpus", "one-to-eight"])
def test_specifications_of_the_demo_measure_nothing(name: str) -> None:
    """``make demo`` needs no GPU: every cell is simulated."""
    file = Path(__file__).parent.parent / "docs" / "demo" / f"{name}.yaml"
    spec = parse_spec(file.read_text(encoding="utf-8"), file.name)
    cells = spec.all_cells()
    assert len(cells) >= 4
    assert all(cell.simulated for cell in cells)


SIMULATED_ALONE = f"name: made\ncells:\n{SIMULATED}workload: {{examples: 10, epochs: 1}}\n"


def test_a_sweep_of_simulated_cells_names_no_gpus_to_measure_on() -> None:
    """They are named where a block is measured; both ways out are in the message."""
    assert all(cell.simulated for cell in spec_of(SIMULATED_ALONE).all_cells())
    for text in (
        SIMULATED_ALONE.replace("    simulated_on: [A40, H100-SXM]\n", ""),
        ONE_CELL.replace("gpus: [cpu]\n", ""),
    ):
        with pytest.raises(SpecError) as error:
            spec_of(text)
        assert "gpus: is missing: add it, or simulated_on to each block" in str(error.value)
