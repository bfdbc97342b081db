"""Write the tree of ``docs/finding-your-way.md``: every folder, its purpose and its modules.

``make docs`` fails when the page shows another tree than there is; running this mends it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "finding-your-way.md"
PACKAGES = ("gpu_catalog", "trials", "fitting", "orchestrator")
BEGIN, END = "<!-- tree: begin -->\n", "<!-- tree: end -->\n"


def tree() -> str:
    """The packages as Markdown, a heading and a list of links for each folder with modules."""
    return "".join(_folder(folder) for name in PACKAGES for folder in _folders(ROOT / name))


def _folders(folder: Path) -> Iterator[Path]:
    """The folder and those in it, from the top: packages and the data that they read."""
    yield folder
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.name.startswith("__"):
            yield from _folders(child)


def _folder(folder: Path) -> str:
    path = folder.relative_to(ROOT).as_posix()
    package = folder / "__init__.py"
    purpose = ast.get_docstring(ast.parse(package.read_text("utf-8"))) if package.exists() else None
    files = sorted(file for file in folder.iterdir() if file.is_file() and file != package)
    links = " · ".join(
        f"[{file.name.removesuffix('.py')}](../{path}/{file.name})" for file in files
    )
    heading = f"{'#' * min(3 + path.count('/'), 5)} {path}/"
    sentence = " ".join((purpose or "Data.").partition("\n\n")[0].split())
    return f"{heading}\n\n{sentence}\n\n{links}\n\n"


def main() -> None:
    """Write the tree between its two marks."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + tree() + END + after, "utf-8")


if __name__ == "__main__":
    main()
