"""One-line builders of cells, GPUs and observations."""

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from trials.recipes.fields import Method, Precision
from trials.recipes.recipe import Recipe
from trials.records.built import Built, ParameterCounts
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.records.observation import (
    Basis,
    Environment,
    Measurement,
    MemoryReading,
    Observation,
    Outcome,
)

MIB = 2**20
FULL = Recipe(method="full", precision="fp32")


def recipe(method: Method, *, precision: Precision = "fp32", **others: object) -> Recipe:
    """A recipe; its adapters, if any, have rank 4."""
    rank = None if method == "full" else 4
    return Recipe.model_validate(
        {"method": method, "lora_rank": rank, "precision": precision} | others
    )


def tiny_cell(
    model: str = "llama-tiny",
    recipe: Recipe = FULL,
    *,
    active: int | None = None,
    seq_len: int = 16,
) -> Cell:
    """A preset on the CPU with the preset's active experts, or ``active``."""
    facts = find_model(model)
    return Cell(
        gpu="cpu",
        model=model,
        recipe=with_defaults(recipe, facts, cpu()),
        experts=facts.experts,
        active_experts=active or facts.active_experts,
        seq_len=seq_len,
    )


def cpu(budget_bytes: int = 256 * MIB) -> Gpu:
    """The catalog's CPU with another memory budget."""
    return load_catalog().gpu("cpu").model_copy(update={"usable_memory_bytes": budget_bytes})


def environment(**changed: object) -> Environment:
    """Environment of a probe."""
    values: dict[str, object] = {
        "versions": (("python", "3.11.1"), ("torch", "2.9.0")),
        "device_name": "a processor",
        "threads": 1,
        "host": "here",
    }
    return Environment.model_validate(values | changed)


def built(**changed: object) -> Built:
    """An ordinary model of 250 parameters."""
    values: dict[str, object] = {
        "parameters": ParameterCounts(total=250, trainable=250, four_bit=0),
        "dtypes": ("float32",),
        "adapters": 0,
        "attention": "sdpa",
        "experts": None,
        "mamba": None,
        "checkpointed_layers": 0,
        "layers": 2,
        "optimizer": "torch.optim.adamw.AdamW",
        "kernels": (),
    }
    return Built.model_validate(values | changed)


def measurement(peak_memory_bytes: int = MIB, step_seconds: tuple[float, ...] = ()) -> Measurement:
    """Measurement of a probe that fits."""
    return Measurement(
        memory_steps=3,
        memory=MemoryReading(peak_allocated_bytes=peak_memory_bytes),
        model_memory_bytes=1000,
        step_seconds=step_seconds,
        stop_reason="precise" if step_seconds else None,
        built=built(),
    )


def observation(batch_size: int, outcome: Outcome = Outcome.FITS, **changed: object) -> Observation:
    """A search probe of llama-tiny with a batch limit of 64."""
    values: dict[str, object] = {
        "cell": tiny_cell(),
        "purpose": "search",
        "batch_size": batch_size,
        "outcome": outcome,
        "detail": None if outcome is Outcome.FITS else "why",
        "basis": Basis.MEASURED,
        "memory_limit_bytes": 256 * MIB,
        "batch_limit": 64,
        "seed": 0,
        "measurement": measurement() if outcome is Outcome.FITS else None,
        "environment": environment(),
        "started_at": "2026-11-20T12:00:00+00:00",
        "seconds": 1.5,
    }
    return Observation.model_validate(values | changed)
