"""Muon: which parameters it updates, and by what."""

import math

import pytest
import torch
from torch import nn

from trials.training.optimizers.muon import UPDATE_SCALE, Muon, muon_groups, orthogonalised

RATE = 0.1


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_an_update_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    """The iterations end between 0.5 and 1.5 whatever the matrix, wide or tall."""
    matrix = 100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrix).float())
    assert orthogonalised(matrix).shape == shape
    assert values.min() > 0.3
    assert values.max() < 1.5


def test_matrices_but_embeddings_and_head_are_muons() -> None:
    """Vectors, embeddings and head are AdamW's; frozen parameters are nobody's."""
    layers = {"embed_tokens": nn.Embedding(8, 4), "up": nn.Linear(4, 6), "lm_head": nn.Linear(4, 8)}
    model = nn.ModuleDict(layers)
    trained = [p for p in model.parameters() if p is not layers["lm_head"].bias]
    matrices, others = muon_groups(model, trained)
    assert [id(p) for p in matrices] == [id(layers["up"].weight)]
    assert {p.shape for p in others} == {(8, 4), (6,)}
    assert len(others) == 3


def test_a_first_step_is_its_equation() -> None:
    """A matrix moves by its orthogonal gradient, all else by the sign of its own, as in AdamW."""
    matrix, vector = nn.Parameter(torch.zeros(4, 9)), nn.Parameter(torch.zeros(3))
    optimizer = Muon([{"params": [matrix]}, {"params": [vector]}], RATE)
    matrix.grad = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    vector.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer.step()
    moved = orthogonalised(matrix.grad * 1.95).float() * -RATE * UPDATE_SCALE * math.sqrt(9)
    torch.testing.assert_close(matrix.detach(), moved)
    torch.testing.assert_close(vector.detach(), -RATE * torch.tensor([1.0, -1.0, 1.0]))
    assert set(optimizer.state[matrix]) == {"momentum"}
