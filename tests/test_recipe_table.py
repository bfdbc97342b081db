"""Recipes side by side: what is compared with what, where, and what is left empty."""

from observations import MIB, measurement, observation, recipe, tiny_cell

from orchestrator.recipe_table import compare_recipes, plainness, recipes_section
from trials.observation import Basis, Observation, Outcome
from trials.recipe import Recipe

PLAIN = recipe("full", attention="sdpa")
CHECKPOINTED = recipe("full", attention="sdpa", gradient_checkpointing=True)
ADAPTED = recipe("lora", attention="sdpa")


def probe(
    of: Recipe, batch_size: int, peak_mib: float, seconds: float | None = None, **changed: object
) -> Observation:
    """A probe of llama-tiny that fits, timed or not."""
    steps = () if seconds is None else (seconds,) * 6
    return observation(
        batch_size,
        cell=tiny_cell(of=of),
        measurement=measurement(round(peak_mib * MIB), steps),
        **changed,
    )


def miss(of: Recipe, batch_size: int) -> Observation:
    """One that does not."""
    return observation(batch_size, Outcome.OUT_OF_MEMORY, cell=tiny_cell(of=of))


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
    """The plainest first; what was not timed or is not known is absent."""
    (found,) = compare_recipes(SEEN)
    assert found.batch_size == 2
    assert [row.recipe.key for row in found.rows] == [
        "full-fp32",
        "full-fp32-checkpointed",
        "lora-r4-all-linear-fp32",
    ]
    assert [row.peak_bytes // MIB for row in found.rows] == [100, 65, 50]
    assert [row.step_seconds for row in found.rows] == [0.20, 0.26, None]
    assert [row.largest for row in found.rows] == [2, 8, None]
    assert [row.queries_per_second for row in found.rows] == [10.0, 8.0, None]


def test_the_table_says_what_each_recipe_saves_and_costs() -> None:
    """Relative to the plainest, which the text names."""
    text = recipes_section(SEEN)
    assert "at batch size 2 (the largest that all were measured at)" in text
    assert "Relative to full-fp32:" in text
    rows = [
        [c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if "MiB" in line
    ]
    assert rows == [
        ["full-fp32", "100.00 MiB", "+0%", "0.2 s", "+0%", "2", "10", "+0%"],
        ["full-fp32-checkpointed", "65.00 MiB", "-35%", "0.26 s", "+30%", "8", "8", "-20%"],
        ["lora-r4-all-linear-fp32", "50.00 MiB", "-50%", "", "", "", "", ""],
    ]


def test_a_recipe_alone_is_compared_with_nothing() -> None:
    """Nor two that share no batch size, nor two on different GPUs."""
    assert recipes_section(SEEN[:4]) == ""
    assert compare_recipes([probe(PLAIN, 1, 80), probe(ADAPTED, 2, 50)]) == []
    elsewhere = tiny_cell(of=ADAPTED).model_copy(update={"gpu": "other"})
    assert compare_recipes([probe(PLAIN, 1, 80), observation(1, cell=elsewhere)]) == []


def test_a_capped_gpu_is_not_compared() -> None:
    """Its steps would be another one's."""
    capped = [o.model_copy(update={"basis": Basis.CAPPED}) for o in SEEN]
    assert compare_recipes(capped) == []


def test_the_plainest_recipe_saves_no_memory() -> None:
    """Full weights, no recomputing, PyTorch's attention and optimizer, nothing on the host."""
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
