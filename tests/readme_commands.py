"""Checks the commands and links that the documentation shows. Run by `make check`.

Each command of the program must be one that its parser accepts, each make target must exist, each
other command must be one that the documentation means to use, and each link in the README must lead
to a file. Each file that a command of the README reads must be in the repository, or an earlier
command must write it.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from orchestrator.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = re.compile(
    r"(?:(?:^|\$\()finetune-cost|python -m orchestrator)((?: (?:'[^']*'|[^'()])*)?)"
)
OTHERS = {".", "cd", "eval", "export", "git", "pip", "ray", "sky"}
# What a reader types to prepare a cloud; deploy/README.md alone has it.
CLOUDS = {"aws", "az", "docker", "done", "for", "gcloud", "kubectl", "sed"}
ASSIGNMENT = re.compile(r"[A-Za-z_]+=")
WRITTEN = {"--out", "--save", "--export"}
FILE = re.compile(r"[\w./-]+\.(ya?ml|csv|jsonl?)|\.?[\w.-]*/[\w./-]+")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def documents() -> list[Path]:
    """Every document with commands."""
    files = ["README.md", "CONTRIBUTING.md", "deploy/README.md"]
    return [*(ROOT / file for file in files), *sorted((ROOT / "docs").rglob("*.md"))]


def shown_commands(text: str) -> list[str]:
    """The command lines in the ```sh blocks of a Markdown text."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def mistake(command: str) -> str | None:
    """What is wrong with a command, or None."""
    program = PROGRAM.search(command)
    if program is not None:
        try:
            PARSER.parse_args(shlex.split(program[1].removesuffix(" &")))
        except SystemExit as end:
            return None if end.code == 0 else "the command line does not accept it"
        return None
    words = shlex.split(command)
    if words[0] == "make":
        ended = subprocess.run(
            ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, check=False
        )
        return None if ended.returncode == 0 else "no such target"
    is_meant = words[0] in OTHERS | CLOUDS or ASSIGNMENT.match(command)
    return None if is_meant else "not a command we know"


def missing_files(commands: Sequence[str]) -> Iterator[str]:
    """Commands with a file that is not there when they run in their order, from a clone."""
    written = set()
    for command in commands:
        words = shlex.split(command)
        for option, word in pairwise(words):
            if option in WRITTEN:
                written.add(word)
            elif option == "sweep":
                written.add(f"runs/{Path(word).stem}")
            if FILE.fullmatch(word) and word not in written and not (ROOT / word).exists():
                yield f"{command}: {word}: no such file"


PARSER = build_parser()


def main() -> int:
    """Prints each wrong command and dead link; 1 if there is one."""
    commands = [(f, c) for f in documents() for c in shown_commands(f.read_text(encoding="utf-8"))]
    wrong = [f"{f.relative_to(ROOT)}: {c}: {why}" for f, c in commands if (why := mistake(c))]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    own = [command for command in shown_commands(readme) if not command.startswith(". ")]
    wrong += [f"README.md: {line}" for line in missing_files(own)]
    links = LINK.findall(readme)
    wrong += [f"README.md: {link}: no such file" for link in links if not (ROOT / link).exists()]
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    if not wrong:
        sys.stdout.write(f"documentation: {len(commands)} commands and {len(links)} links exist\n")
    return 1 if wrong or not commands else 0


if __name__ == "__main__":
    sys.exit(main())
