"""Scripts of bash in task files."""

import re

import yaml

from orchestrator.exporting.task_file import Target


def scripts(target: Target, text: str) -> list[str]:
    """Scripts of a task file, that of the training last."""
    if target == "skypilot":
        task = yaml.safe_load(text)
        return [task["setup"], task["run"]]
    if target == "dstack":
        return list(yaml.safe_load(text)["commands"])
    return [text, *re.findall(r"^[^#\n]*<< 'JOB'\n(.*?)^JOB$", text, re.MULTILINE | re.DOTALL)]
