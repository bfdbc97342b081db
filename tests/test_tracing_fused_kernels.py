"""Kernels of a GPU under a trace."""

import pytest
import torch
from builders.observations import recipe
from builders.whole_steps import deep, traced
from torch.nn import functional

from trials.recipes.fields import Precision
from trials.simulation.recording import Kind, OperatorClass, Rate
from trials.simulation.tracing.kernels.fused_kernels import as_on_gpu

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp32-mixed-load"])
def test_autocast_runs_attention_in_bf16(precision: Precision) -> None:
    """Position embeddings make queries fp32 where the embedding is; autocast casts them back."""
    recording = traced(deep("llama-tiny", 3), recipe("lora", precision=precision)).recording
    ran = recording.names[recording.kinds == Kind.RUN]
    for kernel in (OperatorClass.ATTENTION_FORWARD, OperatorClass.ATTENTION_BACKWARD):
        assert set(ran[ran // 4 == kernel]) == {4 * kernel + Rate.BF16}


def test_grouped_queries_under_a_mask_take_plain_products() -> None:
    """No fused kernel of PyTorch has both; the result and its gradients are PyTorch's."""
    query = torch.randn(2, 4, 8, 16)
    key = torch.randn(2, 2, 8, 16, requires_grad=True)
    mask = torch.randn(1, 1, 8, 8)
    attention = functional.scaled_dot_product_attention
    expected = attention(query, key, key, mask, enable_gqa=True)
    with as_on_gpu():
        found = functional.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), key)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), key)[0])
