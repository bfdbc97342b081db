"""``python -m orchestrator``."""

from orchestrator.cli.main import program

if __name__ == "__main__":
    program()
