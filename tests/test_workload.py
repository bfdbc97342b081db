import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trials.workload import Cell, Recipe

RECIPES = st.builds(
    Recipe,
    method=st.just("full"),
    precision=st.sampled_from(["fp32", "bf16"]),
    gradient_checkpointing=st.booleans(),
) | st.builds(
    Recipe,
    method=st.sampled_from(["lora", "qlora"]),
    lora_rank=st.integers(1, 20),
    precision=st.sampled_from(["fp32", "bf16"]),
    gradient_checkpointing=st.booleans(),
)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Draw from few values of each field, so that cells are often alike in all but one."""
    experts = draw(st.none() | st.sampled_from([2, 8, 12]))
    return Cell(
        gpu=draw(st.sampled_from(["cpu", "A40", "A100-PCIe-80GB"])),
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
    ("recipe", "key"),
    [
        (Recipe(method="full"), "full-fp32"),
        (Recipe(method="full", precision="bf16"), "full-bf16"),
        (Recipe(method="lora", lora_rank=8), "lora-r8-fp32"),
        (
            Recipe(method="qlora", lora_rank=16, precision="bf16", gradient_checkpointing=True),
            "qlora-r16-bf16-checkpointed",
        ),
    ],
)
def test_the_recipe_keys_are_these(recipe: Recipe, key: str) -> None:
    """Records of last year are found under the same names this year."""
    assert recipe.key == key


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({}, "cpu/mixtral-tiny/qlora-r8-fp32/2of8/seq128"),
        (
            {"experts": None, "active_experts": None, "gpu": "A40", "seq_len": 8},
            "A40/mixtral-tiny/qlora-r8-fp32/dense/seq8",
        ),
    ],
)
def test_the_cell_keys_are_these(changed: dict[str, object], key: str) -> None:
    """Records of last year are found under the same names this year."""
    assert cell(**changed).key == key


@given(cells(), cells())
def test_cells_share_a_key_only_when_they_are_equal(one: Cell, other: Cell) -> None:
    """Every field of a cell and of its recipe is told by the key, so no two cells are mixed up."""
    assert (one.key == other.key) == (one == other)


@given(RECIPES, RECIPES)
def test_recipes_share_a_key_only_when_they_are_equal(one: Recipe, other: Recipe) -> None:
    """Every field of a recipe is told by its key."""
    assert (one.key == other.key) == (one == other)


def test_full_fine_tuning_has_no_rank() -> None:
    """A rank that nothing uses is a misunderstanding, not a detail."""
    with pytest.raises(ValidationError, match="lora_rank 16 has no meaning with method full"):
        Recipe(method="full", lora_rank=16)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_need_a_rank(method: str) -> None:
    """No rank is guessed; the message has one to write down."""
    with pytest.raises(ValidationError, match=f"method {method} needs lora_rank, for example"):
        Recipe.model_validate({"method": method})


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "prefix"},
        {"method": "lora", "lora_rank": 0},
        {"method": "lora", "lora_rank": "8"},
        {"method": "full", "precision": "fp8"},
        {"method": "full", "gradient_checkpointing": 1},
        {"method": "full", "checkpointing": True},
    ],
)
def test_a_recipe_takes_only_what_it_knows(wrong: dict[str, object]) -> None:
    """A value of the wrong kind and an unknown field are errors, not coerced or dropped."""
    with pytest.raises(ValidationError):
        Recipe.model_validate(wrong)


@pytest.mark.parametrize(
    ("experts", "active", "sparsity"), [(8, 2, 0.25), (8, 8, 1.0), (8, 1, 0.125), (None, None, 1.0)]
)
def test_sparsity_is_the_active_share_of_the_experts(
    experts: int | None, active: int | None, sparsity: float
) -> None:
    """The paper's s: top-2 of 8 is 0.25, all experts or none at all are 1."""
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
