"""``python -m orchestrator``."""

from orchestrator.cli import program

if __name__ == "__main__":
    program()
