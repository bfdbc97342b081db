"""Updates by the optimizer, under fake tensors."""
