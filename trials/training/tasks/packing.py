"""Micro-batches of packed rows: one sequence with position ids that restart at each example."""

from typing import Any

import torch

from trials.models.fused_head import IGNORED


def packed_inputs(tokens: torch.Tensor, examples_per_row: int) -> dict[str, Any]:
    """Arguments of a model for packed rows, as TRL's collator makes them.

    The examples of a row are equally long, but for a longer last one. All is computed on the
    device of the tokens, so that the host does not wait for it.

    Args:
        tokens: (rows, length) token ids.
        examples_per_row: examples in a row, if it has as many tokens.

    Returns:
        Token ids, position ids and number of the example of each token, all (1, rows x length);
        the bounds of the examples (examples + 1,) and the tokens of the longest one for queries
        and keys.
    """
    rows, length = tokens.shape
    count = min(examples_per_row, length)
    shortest = length // count
    places = torch.arange(length, device=tokens.device)
    numbers = (places // shortest).clamp(max=count - 1)
    first = count * torch.arange(rows, device=tokens.device)
    bounds = torch.arange(rows * count + 1, device=tokens.device)
    bounds = (bounds // count * length + bounds % count * shortest).to(torch.int32)
    longest = length - (count - 1) * shortest
    return {
        "input_ids": tokens.reshape(1, -1),
        "position_ids": (places - numbers * shortest).repeat(rows)[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": (first[:, None] + numbers).reshape(1, -1).to(torch.int32),
    }


def packed_labels(labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Labels of packed rows, (1, tokens), without a loss for the first token of each example."""
    return labels.reshape(1, -1).masked_fill(position_ids == 0, IGNORED)
