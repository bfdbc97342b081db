"""Recording a training step under fake tensors, with torch."""
