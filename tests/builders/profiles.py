"""Made-up profiles: a step whose parts are round numbers."""

from builders.observations import environment, recipe, tiny_cell
from trials.records.observation import Outcome
from trials.records.profile import ExpertLoad, Layer, Profile, Profiled, ProfileRow, Stage

ROWS: tuple[tuple[Stage, Layer, str, float, int], ...] = (
    ("forward", "experts", "matmul gate", 0.2, 300),
    ("forward", "attention", "attention", 0.2, 100),
    ("backward", "experts", "matmul gate", 0.3, 600),
    ("backward", "loss", "softmax", 0.1, 0),
    ("recompute", "experts", "host", 0.2, 0),
    ("optimizer", "optimizer", "update", 0.1, 0),
)
LOAD = ExpertLoad(examples=2, training_steps=10, before=((4, 4), (6, 2)), after=((8, 0), (4, 4)))


def profile(scale: float = 1.0) -> Profile:
    """A step with stages of 1, 2 and 0.5 s; profiling makes it 1.5 times as long."""
    return Profile(
        of="cpu",
        plain_seconds=(3.5 * scale,) * 3,
        forward_seconds=(1.0 * scale,) * 3,
        backward_seconds=(2.0 * scale,) * 3,
        optimizer_seconds=(0.5 * scale,) * 3,
        profiled_seconds=(5.25 * scale,) * 3,
        rows=tuple(
            ProfileRow(stage=s, layer=layer, kernel=k, seconds=t, calls=1, flops=f)
            for s, layer, k, t, f in ROWS
        ),
        load=LOAD,
    )


def profiled(batch_size: int = 2, seq_len: int = 16, **changed: object) -> Profiled:
    """A profiled step of mixtral-tiny."""
    values: dict[str, object] = {
        "cell": tiny_cell("mixtral-tiny", recipe("full"), seq_len=seq_len),
        "batch_size": batch_size,
        "outcome": Outcome.FITS,
        "seed": 0,
        "profile": profile(),
        "environment": environment(),
        "started_at": "2026-11-20T12:00:00+00:00",
        "seconds": 9.0,
    }
    return Profiled.model_validate(values | changed)
