"""Reference of a step: ``trl.SFTTrainer`` on tiny models, counted beside the project's own step."""
