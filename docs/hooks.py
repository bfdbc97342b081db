"""Hooks of MkDocs that generate parts of the site from the code.

- ``<!-- commands -->`` becomes every command and option of the parser.
- ``<!-- specification -->`` becomes the fields of a specification, from its JSON schema.
- The notebook becomes a page.
- Markdown files outside ``docs/`` become pages under ``project/``.
- A link to any other file of the repository becomes a link to a copy of it under ``source/``.
"""

import argparse
import inspect
import json
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finding_your_way import BEGIN, END, tree
from griffe import Docstring, DocstringSectionKind
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from gpu_catalog.record import Record
from orchestrator.cli.main import build_parser
from orchestrator.spec.job_request import JobRequest
from orchestrator.spec.sweep_spec import SweepSpec
from trials.recipes.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
PROJECT_PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/README.md",
    "tests/benchmarks/README.md",
    "tests/benchmarks/characterisation.md",
)
UNTITLED = {"positional arguments", "options"}
"""Titles that argparse gives to arguments and options without one."""
PROJECT = "project/"
NOTEBOOK = "tutorials/python"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]*)(#[^)\s]*)?(?=\))")
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the Markdown files that lie outside ``docs/``, and the notebook as a page."""
    for path in PROJECT_PAGES:
        files.append(File.generated(config, PROJECT + path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, f"{NOTEBOOK}.md", content=notebook_markdown()))
    return files


def notebook_markdown() -> str:
    """The cells of the notebook as Markdown; the test suite executes them."""
    notebook = json.loads((ROOT / "docs" / f"{NOTEBOOK}.ipynb").read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    parts.append("[This page as a notebook](python.ipynb)")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the generated parts, and redirect links that leave the site."""
    for mark, generate in GENERATED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, generate())
    uri = page.file.src_uri
    if uri == "finding-your-way.md" and BEGIN + tree() + END not in markdown:
        log.warning("%s: the tree has changed: run docs/finding_your_way.py", uri)
    is_outside = uri.startswith(PROJECT)
    folder = posixpath.dirname(uri.removeprefix(PROJECT) if is_outside else f"docs/{uri}")

    def redirected(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        target_uri = _page_of(target, config, files)
        if target_uri is None:
            log.warning("%s: %s: no such file", uri, link[1])
            return link[0]
        anchor = "" if target == "README.md" else link[2] or ""  # index.md has other headings
        return posixpath.relpath(target_uri, posixpath.dirname(uri) or ".") + anchor

    return LINK.sub(redirected, markdown)


def _page_of(path: str, config: MkDocsConfig, files: Files) -> str | None:
    """URI in the site of a file of the repository; None where there is no such file."""
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    if path in PROJECT_PAGES:
        return PROJECT + path
    if (ROOT / path).is_dir():
        return f"finding-your-way.md#{path.replace('/', '')}"
    if not (ROOT / path).is_file():
        return None
    uri = f"source/{path}.txt"
    if files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return uri


def commands_markdown() -> str:
    """Every command with its options, in the parser's order."""
    return "\n".join(_commands(build_parser(), ""))


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        summaries = {choice.dest: choice.help for choice in action._choices_actions}
        for name, command in action.choices.items():
            yield from _command(command, f"{path} {name}".strip(), summaries.get(name))
            yield from _commands(command, f"{path} {name}".strip())


def _command(command: argparse.ArgumentParser, path: str, summary: str | None) -> Iterator[str]:
    yield f"\n## {path}\n"
    text = command.description or summary
    if text:
        yield _cell(text[0].upper() + text[1:].rstrip(".") + ".") + "\n"
    for group in command._action_groups:
        rows = [row for action in group._group_actions if (row := _option(action))]
        if not rows:
            continue
        if (title := _cell(group.title)) not in UNTITLED:
            yield f"\n**{title[:1].upper()}{title[1:]}**\n"
        yield "| argument | meaning |"
        yield "|---|---|"
        yield from rows
        yield ""
    if command.epilog:
        yield f"\n```text\n{command.epilog.removeprefix('examples:').strip(chr(10))}\n```"


def _option(action: argparse.Action) -> str | None:
    is_hidden = action.dest == "help" or action.help == argparse.SUPPRESS
    if is_hidden or isinstance(action, argparse._SubParsersAction):
        return None
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else None)
    if value is None and action.nargs != 0:
        value = action.dest.upper()
    if not action.option_strings:
        shown = f"`{value}`"
    elif action.nargs == 0:
        shown = f"`{', '.join(action.option_strings)}`"
    else:
        shown = f"`{', '.join(action.option_strings)} {value}`"
    needed = "**Required.** " if action.required and action.option_strings else ""
    return f"| {_cell(shown)} | {needed}{_cell((action.help or '') % vars(action))} |"


def _cell(text: object) -> str:
    """Text escaped for a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def specification_markdown() -> str:
    """Tables of the fields of a specification: the file, then each record in it."""
    sweep, job = SweepSpec.model_json_schema(), JobRequest.model_json_schema()
    records: dict[str, Any] = sweep["$defs"] | job["$defs"] | {"JobRequest": job}
    for record in (JobRequest, Recipe):
        # A field may be documented in a class that the record inherits from.
        documented = [c.__doc__ for c in record.__mro__ if issubclass(c, Record) and c.__doc__]
        description = "\n\n".join(inspect.cleandoc(text) for text in documented)
        records[record.__name__]["description"] = description
    # The file has a job's request, not the job with its lengths counted.
    sweep["properties"]["workload"] = {"$ref": "#/$defs/JobRequest"}
    parts = [_record("The file", sweep, records)]
    shown: set[str] = set()
    waiting = _records_of(sweep, "")
    while waiting:
        path, name = waiting.pop(0)
        if name in shown:
            continue
        shown.add(name)
        parts.append(_record(f"`{path}` {{#{name.lower()}}}", records[name], records))
        waiting += _records_of(records[name], f"{path}.")
    return "\n\n".join(parts)


def _records_of(schema: dict[str, Any], path: str) -> list[tuple[str, str]]:
    """Fields of a record that are records themselves: their path in the file, and their name."""
    return [
        (path + field, name)
        for field, value in schema.get("properties", {}).items()
        for name in re.findall(r"#/\$defs/(\w+)", str(value))
    ]


def _record(heading: str, schema: dict[str, Any], records: dict[str, Any]) -> str:
    meanings: dict[str, str] = {}
    prose = ""
    for section in Docstring(schema.get("description", "")).parse("google"):
        if section.kind is DocstringSectionKind.attributes:
            for attribute in section.value:
                meanings[attribute.name] = attribute.description.removesuffix(".")
        elif section.kind is DocstringSectionKind.text:
            prose = prose or section.value.partition("\n\n")[0]
    required = schema.get("required", ())
    lines = [f"## {heading}", "", prose, ""]
    lines += ["| field | value | default | meaning |", "|---|---|---|---|"]
    for field, value in schema.get("properties", {}).items():
        default = "**required**" if field in required else _default(value.get("default"))
        kind = _cell(_kind(value, records))
        lines.append(f"| `{field}` | {kind} | {default} | {_cell(meanings.get(field, ''))} |")
    return "\n".join(lines)


def _default(value: object) -> str:
    if value is None or value in ([], {}):
        return "optional"
    if isinstance(value, dict):
        return "see its fields"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _kind(value: dict[str, Any], records: dict[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[fields](#{name.lower()})" if name in records else name
    if "anyOf" in value:
        return " or ".join(_kind(v, records) for v in value["anyOf"] if v.get("type") != "null")
    if "const" in value or "enum" in value:
        return ", ".join(f"`{v}`" for v in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        items = value.get("items") or {}
        return f"list of {_kind(items, records)}" if items else "list"
    words = {"integer": "whole number", "string": "text", "boolean": "`true`, `false`"}
    kind = str(value.get("format") or words.get(value.get("type", ""), value.get("type", "")))
    limits = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    bounds = [f"{word} {value[key]:g}" for key, word in limits.items() if key in value]
    return ", ".join([kind, *bounds])


GENERATED = {
    "<!-- commands -->": commands_markdown,
    "<!-- specification -->": specification_markdown,
}
