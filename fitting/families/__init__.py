"""The step-time law of a (model, recipe, software): its record and its predictions."""
