"""Speed at which this machine's host dispatches the operators of a step."""
