"""Kernels of a GPU under a trace."""

import pytest
from builders.observations import recipe
from builders.whole_steps import deep, traced

from trials.recipes.fields import Precision
from trials.simulation.recording import Kind, OperatorClass, Rate

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
