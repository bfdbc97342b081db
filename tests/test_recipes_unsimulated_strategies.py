"""Strategies that are not simulated are refused by name, on the command line and in files."""

import argparse

import pytest
from builders.specifications import altered, mistakes_in

from orchestrator.cli.options.value_types import STRATEGIES, strategy
from trials.recipes.unsimulated_strategies import unsimulated_strategy


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pp", "pipeline parallelism"),
        ("pipeline", "pipeline parallelism"),
        ("pipeline-parallel", "pipeline parallelism"),
        ("Pipeline_Parallelism", "pipeline parallelism"),
        ("pipeline_model_parallel", "pipeline parallelism"),
        ("ep", "expert parallelism"),
        ("expert", "expert parallelism"),
        ("expert parallelism", "expert parallelism"),
        ("context-parallel", "context parallelism"),
        ("fsdp", "FSDP1"),
        ("deepspeed", "DeepSpeed without its stage"),
    ],
)
def test_strategies_that_are_not_simulated_are_named(name: str, kind: str) -> None:
    """The option and the block of a specification say the same, and list what is simulated."""
    problem = f"{name!r} is {kind}, which is not simulated yet: "
    with pytest.raises(argparse.ArgumentTypeError) as error:
        strategy(name)
    assert str(error.value) == f"{problem}give {', '.join(STRATEGIES)} or auto"
    for more in ("", ", offload: all"):
        layout = f"    parallel: [{{gpus: 2, strategy: {name}{more}}}]\nworkload:"
        (mistake,) = mistakes_in(altered("workload:", layout))
        listed = f"use {', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}"
        assert mistake == f"7: cells[0].parallel[0].strategy: {problem}{listed}"


@pytest.mark.parametrize("name", [*STRATEGIES, "auto", "fsdp3", "parallel", ""])
def test_other_names_are_no_such_strategies(name: str) -> None:
    """Neither strategies that are simulated, nor a word that is none."""
    assert unsimulated_strategy(name) is None
