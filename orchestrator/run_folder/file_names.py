"""Names of the files in a run folder."""

REPORT, PAGE = "report.md", "report.html"


SPEC = "sweep.yaml"
MODELS = "models.json"
LENGTHS = "lengths.json"
CATALOG = "catalog.json"
PLAN = "plan.json"
LEARNED = "learned.jsonl"
LEARNING = "learning"
FAULTS = "faults.json"
RENTED = "rented.json"
