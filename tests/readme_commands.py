"""Checks that every command the README shows exists. Run by `make check`."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from orchestrator.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent


def shown_commands(text: str) -> list[str]:
    """The command lines in the ```sh blocks of a Markdown text."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def mistake(command: str) -> str | None:
    """What is wrong with a command, or None."""
    words = shlex.split(command)
    if "orchestrator" in words:
        try:
            build_parser().parse_args(words[words.index("orchestrator") + 1 :])
        except SystemExit as end:
            return None if end.code == 0 else "the command line does not accept it"
        return None
    if words[0] == "make":
        ended = subprocess.run(
            ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, check=False
        )
        return None if ended.returncode == 0 else "no such target"
    return (
        None if words[0] in {"ray", "git", "cd", "export", "pip", "."} else "not a command we know"
    )


def main() -> int:
    """Prints each wrong command; 1 if there is one."""
    commands = shown_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    wrong = [(c, why) for c in commands if (why := mistake(c)) is not None]
    for command, why in wrong:
        sys.stderr.write(f"README.md: {command}: {why}\n")
    if not wrong:
        sys.stdout.write(f"README.md: {len(commands)} commands exist\n")
    return 1 if wrong or not commands else 0


if __name__ == "__main__":
    sys.exit(main())
