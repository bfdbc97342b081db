import pickle

import pytest
from builders.recipes import RECIPES
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Draw from few values of each field, so that cells are often alike in all but one."""
    experts = draw(st.none() | st.sampled_from([2, 8, 12]))
    return Cell(
        gpu=draw(st.sampled_from(["cpu", "A40", "A100-PCIe-80GB"])),
        capped_on=draw(st.sampled_from([None, "H200"])),
        weights=draw(st.sampled_from(["random", "pretrained"])),
        model=draw(st.sampled_from(["mixtral-tiny", "mistralai/Mixtral-8x7B", "full"])),
        recipe=draw(RECIPES),
        experts=experts,
        active_experts=None if experts is None else draw(st.integers(1, experts)),
        seq_len=draw(st.sampled_from([1, 8, 18, 128])),
    )


def cell(**changed: object) -> Cell:
    """The cell of the docstring of Cell.key, with some fields changed."""
    values: dict[str, object] = {
        "gpu": "cpu",
        "model": "mixtral-tiny",
        "recipe": Recipe(method="qlora", lora_rank=8),
        "experts": 8,
        "active_experts": 2,
        "seq_len": 128,
    }
    return Cell.model_validate(values | changed)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({}, "cpu/mixtral-tiny/qlora-r8-bf16/2of8/seq128"),
        (
            {"experts": None, "active_experts": None, "gpu": "A40", "seq_len": 8},
            "A40/mixtral-tiny/qlora-r8-bf16/dense/seq8",
        ),
        (
            {"gpu": "A40", "capped_on": "H200-SXM", "weights": "pretrained"},
            "A40@H200-SXM/mixtral-tiny+pretrained/qlora-r8-bf16/2of8/seq128",
        ),
    ],
)
def test_cell_keys_are_stable(changed: dict[str, object], key: str) -> None:
    """Last year's records have the same keys this year."""
    assert cell(**changed).key == key


def test_the_device_of_a_capped_cell_is_the_larger_gpu() -> None:
    """The cell describes the A40, and the H200 runs it."""
    assert cell(gpu="A40", capped_on="H200-SXM").device == "H200-SXM"
    assert cell(gpu="A40").device == "A40"


@given(cells(), cells())
def test_cells_share_a_key_only_when_they_are_equal(one: Cell, other: Cell) -> None:
    """The key includes every field of a cell and of its recipe."""
    assert (one.key == other.key) == (one == other)


@pytest.mark.parametrize(
    ("experts", "active", "sparsity"), [(8, 2, 0.25), (8, 8, 1.0), (8, 1, 0.125), (None, None, 1.0)]
)
def test_sparsity_is_the_active_share_of_the_experts(
    experts: int | None, active: int | None, sparsity: float
) -> None:
    """The paper's s: top-2 of 8 is 0.25; all experts, or a dense model, are 1."""
    assert cell(experts=experts, active_experts=active).sparsity == sparsity


@pytest.mark.parametrize(
    ("experts", "active", "message"),
    [
        (8, None, "given together or not at all"),
        (None, 2, "given together or not at all"),
        (8, 9, "active_experts 9 exceeds the 8 experts of mixtral-tiny"),
        (8, 0, "greater than or equal to 1"),
    ],
)
def test_active_experts_must_exist(experts: int | None, active: int | None, message: str) -> None:
    """A sparsity that no model can have is refused before anything is built."""
    with pytest.raises(ValidationError, match=message):
        cell(experts=experts, active_experts=active)


def test_a_changed_copy_of_a_cell_has_a_hash_of_its_own() -> None:
    """A cell keeps its hash; copies of it, and those in another process, do not take it along."""
    one = cell()
    assert hash(one) == hash(one.model_copy()) == hash(pickle.loads(pickle.dumps(one)))  # noqa: S301 - our own
    other = one.model_copy(update={"seq_len": one.seq_len + 1})
    assert hash(other) == hash(cell(seq_len=one.seq_len + 1)) != hash(one)
    assert "_hash" not in one.model_dump() | vars(one)


@pytest.mark.parametrize(
    ("effective", "gpus", "largest", "name"),
    [
        (None, 1, 8, "search's limit"),
        (16, 1, 8, "search's limit"),
        (16, 1, 16, "effective batch"),
        (16, 2, 8, "effective batch"),
    ],
)
def test_a_largest_batch_below_the_share_of_the_effective_one_reached_the_searchs_limit(
    effective: int | None, gpus: int, largest: int, name: str
) -> None:
    """On several GPUs each has its share."""
    recipe = Recipe(method="full", effective_batch=effective)
    layout = None if gpus == 1 else Parallel(gpus=gpus, strategy="ddp")
    assert cell(recipe=recipe, parallel=layout).limit_name(largest) == name
