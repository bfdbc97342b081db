"""The parent's side of a trial: fork server, pipes and kills."""
