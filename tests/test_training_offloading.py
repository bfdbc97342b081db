"""The offloaded update by DeepSpeed itself against plain AdamW. It builds its kernels with g++."""

from importlib.util import find_spec

import pytest
import torch
from builders.observations import recipe, tiny_cell

from trials.records.model import find_model
from trials.training.finetune import FineTuning

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("accumulation", [{"gradient_accumulation": 2}, {"effective_batch": 4}])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_an_offloaded_step_equals_that_of_plain_adamw(
    accumulation: dict[str, int], max_grad_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and weights after three accumulated steps, clipped or not."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    facts = find_model("llama-tiny")
    results = []
    for is_offloaded in (False, True):
        stated = recipe(
            "full",
            max_grad_norm=max_grad_norm,
            offload_optimizer=is_offloaded,
            **accumulation,
        )
        training = FineTuning(tiny_cell(recipe=stated), facts, device=torch.device("cpu"), seed=3)
        generator = torch.Generator().manual_seed(1)
        losses = [
            training.step(
                torch.randint(facts.vocab_size, (4, 16), generator=generator), micro_batches=2
            )
            for _ in range(3)
        ]
        results.append((losses, [p.detach().clone() for p in training.trainable]))
    (losses, weights), (offloaded_losses, offloaded_weights) = results
    assert offloaded_losses == pytest.approx(losses, abs=1e-6)
    for weight, offloaded in zip(weights, offloaded_weights, strict=True):
        torch.testing.assert_close(offloaded, weight, rtol=0, atol=5e-7)
