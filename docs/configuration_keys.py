"""Write the tables of ``docs/reference/configurations.md``: the class of each key of a trainer."""

from pathlib import Path

from orchestrator.configurations.keys_reference import keys_reference

PAGE = Path(__file__).resolve().parent / "reference" / "configurations.md"
MARK = "<!-- keys -->\n"


def main() -> None:
    """Write the tables below the mark."""
    before = PAGE.read_text("utf-8").partition(MARK)[0]
    PAGE.write_text(before + MARK + "\n" + keys_reference(), "utf-8")


if __name__ == "__main__":
    main()
