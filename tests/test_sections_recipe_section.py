"""The section of recipes side by side: which are compared, where, and empty values."""

import pytest
from builders.observations import MIB, environment, measurement, observation, recipe, tiny_cell

from orchestrator.reporting.sections.recipe_section import (
    compare_recipes,
    plainness,
    recipes_section,
)
from trials.recipes.recipe import Recipe
from trials.records.observation import Basis, Observation, Outcome

PLAIN = recipe("full", attention="sdpa")
CHECKPOINTED = recipe("full", attention="sdpa", gradient_checkpointing=True)
ADAPTED = recipe("lora", attention="sdpa", lora_targets=("all-linear",))


def probe(
    settings: Recipe,
    batch_size: int,
    peak_mib: float,
    seconds: float | None = None,
    **changed: object,
) -> Observation:
    """A probe of llama-tiny that fits, timed or not."""
    steps = () if seconds is None else (seconds,) * 6
    return observation(
        batch_size,
        cell=tiny_cell(recipe=settings),
        measurement=measurement(round(peak_mib * MIB), steps),
        **changed,
    )


def miss(settings: Recipe, batch_size: int) -> Observation:
    """A probe of llama-tiny that runs out of memory."""
    return observation(batch_size, Outcome.OUT_OF_MEMORY, cell=tiny_cell(recipe=settings))


SEEN = [
    probe(CHECKPOINTED, 1, 60, 0.14),
    probe(CHECKPOINTED, 2, 65, 0.26),
    probe(CHECKPOINTED, 8, 95, 1.00),
    miss(CHECKPOINTED, 9),
    probe(PLAIN, 1, 80, 0.10),
    probe(PLAIN, 2, 100, 0.20),
    miss(PLAIN, 3),
    probe(ADAPTED, 1, 40),
    probe(ADAPTED, 2, 50),
]


def test_recipes_are_compared_at_the_largest_batch_all_were_measured_at() -> None:
    """The plainest is first; values that were not measured are absent."""
    (comparison,) = compare_recipes(SEEN)
    assert comparison.batch_size == 2
    assert [row.recipe.key for row in comparison.rows] == [
        "full-fp32",
        "full-fp32-checkpointed",
        "lora-r4-all-linear-fp32",
    ]
    assert [row.peak_bytes // MIB for row in comparison.rows] == [100, 65, 50]
    assert [row.step_seconds for row in comparison.rows] == [0.20, 0.26, None]
    assert [row.largest for row in comparison.rows] == [2, 8, None]
    assert [row.examples_per_second for row in comparison.rows] == [10.0, 8.0, None]


def cells_of(text: str) -> list[list[str]]:
    """The cells of every row of the section's tables."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "recipe" not in line
    ]


def test_the_table_has_the_saving_and_the_cost_of_each_recipe() -> None:
    """Rows name the axes that vary; the caption names the default."""
    text = recipes_section(SEEN)
    caption, _, _ = text.partition("\n\n|")
    for words in (
        "**llama-tiny, 16 tokens** on cpu",
        "SDPA attention, adamw",
        "batch size 2",
        "full weights, no checkpointing.",
    ):
        assert words in caption
    plain, recomputing = "full weights, no checkpointing", "full weights, checkpointing"
    adapted = "LoRA rank 4 on all-linear, no checkpointing"
    assert cells_of(text) == [
        [plain, "100.00 MiB", "+0%", "0.2 s", "+0%", "2", "10", "+0%"],
        [recomputing, "65.00 MiB", "-35%", "0.26 s", "+30%", "8", "8", "-20%"],
        [adapted, "50.00 MiB", "-50%", "", "", "", "", ""],
    ]


def test_a_batch_size_that_all_were_timed_at_is_preferred() -> None:
    """A step time beside each peak says more than a larger batch without one."""
    observations = [o for o in SEEN if o.cell.recipe != ADAPTED]
    untimed = [
        probe(PLAIN, 2, 100),
        *(o for o in observations if (o.batch_size, o.cell.recipe) != (2, PLAIN)),
    ]
    (comparison,) = compare_recipes(untimed)
    assert (comparison.batch_size, comparison.timed) == (1, True)
    assert "that was timed" in recipes_section(untimed)


def test_a_recipe_of_which_nothing_fits_is_a_row_without_numbers() -> None:
    """That it does not fit is a result; the default is the plainest recipe that fits."""
    built = miss(PLAIN, 1).model_copy(update={"environment": None})  # memory ran out in the build
    text = recipes_section([built, *(o for o in SEEN if o.cell.recipe != PLAIN)])
    assert ": full weights, " in text
    name, *values = cells_of(text)[-1]
    assert name.startswith("full weights, no ")
    assert values == ["does not fit", "", "", "", "0", "", ""]
    assert compare_recipes([built, miss(ADAPTED, 1)]) == []


def test_a_size_that_ever_missed_has_no_speed_and_no_peak() -> None:
    """It cannot be trained at, however fast it was where it fitted."""
    thrashing = observation(
        8,
        Outcome.THRASHING,
        cell=tiny_cell(recipe=CHECKPOINTED),
        measurement=measurement(95 * MIB, (0.01,) * 6),
    )
    (comparison,) = compare_recipes([*SEEN, thrashing, probe(PLAIN, 8, 10, 0.01)])
    assert comparison.batch_size == 2
    assert [row.examples_per_second for row in comparison.rows] == [10.0, 2 / 0.26, None]
    # 8 missed and 2 fits: what lies between is not known.
    assert comparison.rows[1].largest is None


@pytest.mark.parametrize(
    "changed",
    [
        {"environment": environment(versions=(("torch", "3.0"),))},
        {"basis": Basis.SIMULATED},
    ],
)
def test_stacks_and_bases_are_not_compared(changed: dict[str, object]) -> None:
    """Another version's kernels are not an effect of the recipe."""
    other = [o.model_copy(update=changed) for o in SEEN if o.cell.recipe != PLAIN]
    plain = [o for o in SEEN if o.cell.recipe == PLAIN]
    assert compare_recipes(plain + other[:4]) == []
    (comparison,) = compare_recipes([*plain, *other])
    assert [row.recipe for row in comparison.rows] == [CHECKPOINTED, ADAPTED]
    assert comparison.basis is changed.get("basis", Basis.MEASURED)


def test_a_child_that_died_without_a_word_belongs_to_its_cells_stack() -> None:
    """Its cell ran on one stack, and its miss still bounds the largest batch size."""
    lost = [
        o if o.outcome is Outcome.FITS else o.model_copy(update={"environment": None}) for o in SEEN
    ]
    assert compare_recipes(lost) == compare_recipes(SEEN)
    elsewhere = environment(versions=(("torch", "3.0"),))
    again = [
        o.model_copy(update={"environment": elsewhere}) for o in SEEN if o.cell.recipe == PLAIN
    ]
    first = compare_recipes([*lost, *again])[0]
    assert [row.largest for row in first.rows] == [None, 8, None]


EVERY_AXIS = [
    recipe("full"),
    recipe("full", precision="bf16"),
    recipe("full", gradient_checkpointing=True),
    *(
        recipe("full", attention=a, precision="bf16")
        for a in ("eager", "sdpa", "flash_attention_2")
    ),
    *(recipe("full", experts=e) for e in ("looped", "grouped")),
    *(recipe("full", mamba=m) for m in ("mamba-ssm", "reference")),
    *(recipe("full", optimizer=o) for o in ("adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd")),
    recipe("full", offload_optimizer=True),
    recipe("lora"),
    recipe("lora", lora_rank=8),
    recipe("lora", lora_alpha=4),
    recipe("lora", lora_dropout=0.1),
    recipe("lora", lora_targets=("router",)),
    recipe("qlora"),
    recipe("qlora", double_quantisation=False),
    *(recipe("qlora", quantisation=q) for q in ("fp4", "int8")),
]


def test_every_axis_has_words_of_its_own() -> None:
    """Two recipes that differ in any field have different names."""
    observations = [
        observation(1, cell=tiny_cell().model_copy(update={"recipe": axis})) for axis in EVERY_AXIS
    ]
    names = [row[0] for row in cells_of(recipes_section(observations))]
    assert len(names) == len(EVERY_AXIS)
    assert len(set(names)) == len(names)


def test_a_recipe_alone_is_compared_with_nothing() -> None:
    """The same holds without a common batch size, and on different GPUs."""
    assert recipes_section(SEEN[:4]) == ""
    assert compare_recipes([probe(PLAIN, 1, 80), probe(ADAPTED, 2, 50)]) == []
    elsewhere = tiny_cell(recipe=ADAPTED).model_copy(update={"gpu": "other"})
    assert compare_recipes([probe(PLAIN, 1, 80), observation(1, cell=elsewhere)]) == []


def test_a_capped_gpu_is_not_compared() -> None:
    """Its steps ran on another GPU."""
    capped = [o.model_copy(update={"basis": Basis.CAPPED}) for o in SEEN]
    assert compare_recipes(capped) == []


def test_the_plainest_recipe_saves_no_memory() -> None:
    """It has full weights, no checkpointing or offloading, PyTorch's attention and optimizer."""
    recipes = [
        recipe("qlora", precision="bf16"),
        recipe("lora", precision="bf16"),
        recipe("full", precision="bf16", offload_optimizer=True),
        recipe("full", precision="bf16", attention="flash_attention_2"),
        recipe("full", precision="bf16", optimizer="adamw_8bit"),
        recipe("full", precision="bf16", gradient_checkpointing=True),
        recipe("full", precision="bf16", attention="sdpa"),
        recipe("full", precision="bf16", attention="eager"),
    ]
    ordered = sorted(recipes, key=plainness)
    assert ordered[0].attention == "eager"
    assert ordered[1] == recipes[6]
    assert [r.method for r in ordered[-2:]] == ["lora", "qlora"]
