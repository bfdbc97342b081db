"""Checks of a cluster file before it starts anything: values filled in, files to copy there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HUB_TOKEN = "~/.cache/huggingface/token"  # noqa: S105 - a path
REMEDIES = {
    "~/.ray/auth_token": "'ray get-auth-token --generate' makes it",
    HUB_TOKEN: "'hf auth login' makes it; for open weights take its line out of file_mounts",
}
# As `deploy` writes them; those of hosts have keys of GPUs.
PLACEHOLDER = re.compile(r"YOUR_[A-Z0-9][A-Z0-9_.-]*")


def mistakes(config: dict[str, Any]) -> list[str]:
    """Reasons why Ray cannot start a cluster from this machine, one line each.

    Args:
        config: the cluster file.
    """
    names = dict.fromkeys(PLACEHOLDER.findall(json.dumps(config, default=str)))
    unfilled = [f"fill in {', '.join(names)}"] if names else []
    return [*unfilled, *_missing_files(config.get("file_mounts"))]


def missing_hub_token(text: str) -> str | None:
    """Remedy where a cluster file copies a token of the hub that this machine lacks."""
    if HUB_TOKEN not in text or Path(HUB_TOKEN).expanduser().exists():
        return None
    return _missing(HUB_TOKEN)


def _missing_files(mounts: object) -> Iterator[str]:
    """Lines on files of ``file_mounts``, which Ray reads before it starts anything."""
    sources = mounts.values() if isinstance(mounts, dict) else ()
    for source in sources:
        if isinstance(source, str) and not Path(source).expanduser().exists():
            yield _missing(source)


def _missing(source: str) -> str:
    remedy = REMEDIES.get(source, "put it there, or take its line out of file_mounts")
    return f"{source}, which nodes get, is not on this machine: {remedy}"
