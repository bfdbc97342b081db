"""One rank of a group that moves nothing, under fake tensors."""
