"""Census of a step."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trials.records.model import find_model
from trials.training.census import StepCensus


def counted_copies(*copies: torch.Tensor) -> int:
    """Activations on the host by a census of a GPU's step that made these copies."""
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    census = StepCensus(model)
    for copy in copies:
        census.note("aten::copy_", copy)
    return census.built(find_model("llama-tiny"), "AdamW").offloaded_activations


def test_bookkeeping_on_the_host_is_no_activation() -> None:
    """DistributedDataParallel copies the numbers of its buckets to the host; they are integers."""
    numbers, activation = torch.zeros(6, dtype=torch.int32), torch.zeros(2, 8)
    assert counted_copies(numbers) == 0
    assert counted_copies(numbers, activation) == 1
