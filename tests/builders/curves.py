"""Made-up learning curves: right answers and loss, epoch by epoch."""

import random
from collections.abc import Sequence

from builders.observations import FULL, environment, tiny_cell
from trials.records.cell import Cell
from trials.records.learning import HeldOutScores, LearnData, LearnedEpoch, Training

EXAMPLES = 100
SPARSE, DENSE = (tiny_cell("mixtral-tiny", FULL, active=active) for active in (2, 8))


def scores_of(right: int, loss: float) -> HeldOutScores:
    """Scores with this many right answers and a loss that varies between examples."""
    draw = random.Random(0)
    nats = tuple(loss * (1 + 0.1 * draw.uniform(-1, 1)) for _ in range(EXAMPLES))
    correct = tuple(place < right for place in range(EXAMPLES))
    return HeldOutScores(nats=nats, tokens=(1,) * EXAMPLES, correct=correct)


def epochs(
    scores: Sequence[tuple[int, float]],
    cell: Cell = SPARSE,
    *,
    attempt: int = 1,
    data: str = "data.jsonl",
    patience: int = 2,
    learning_rate: float = 1e-3,
) -> list[LearnedEpoch]:
    """A curve of (right answers, loss)."""
    return [
        LearnedEpoch(
            cell=cell,
            training=Training(
                learning_rate=learning_rate, batch_size=8, epochs=9, patience=patience, cutoff=64
            ),
            data=LearnData(
                source=data,
                rendering="fields question, answer",
                held_out_from="the same",
                tokenizer="tok",
                fingerprint=data,
                train_examples=900,
                held_out_examples=EXAMPLES,
                accuracy="exact",
            ),
            attempt=attempt,
            epoch=number,
            train_loss=loss if number else None,
            steps=10,
            skipped_steps=0,
            tested=scores_of(right, loss),
            environment=environment(),
            started_at="2026-11-20T12:00:00+00:00",
        )
        for number, (right, loss) in enumerate(scores)
    ]
