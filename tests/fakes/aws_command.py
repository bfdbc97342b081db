"""The few of Amazon's commands on files that exported tasks run, on a folder as the store."""

import os
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

STORE = Path(os.environ["STORE"])


def place(name: str) -> Path:
    """Path of an address of the store, or of this machine."""
    return STORE / name.removeprefix("s3://") if name.startswith("s3://") else Path(name)


def main(arguments: list[str]) -> None:
    """List, copy a file, or copy the files of a folder."""
    pattern = ""
    if "--exclude" in arguments:
        at = arguments.index("--exclude")
        pattern = arguments[at + 1]
        del arguments[at : at + 2]
    _, action, source, *target = [word for word in arguments if not word.startswith("--")]
    if action == "cp":
        files = {place(source): place(target[0])}
    else:
        every = [path for path in place(source).rglob("*") if path.is_file()]
        kept = [path for path in every if not fnmatch(str(path), pattern)]
        if action == "ls":
            sys.stdout.writelines(f"{path.relative_to(STORE)}\n" for path in kept)
            sys.exit(not kept)  # as Amazon's does
        files = {path: place(target[0]) / path.relative_to(place(source)) for path in kept}
    for path, copy in files.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


main(sys.argv[1:])
