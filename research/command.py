"""The line `python -m research.NAME`: an interruption and a wrong input end as in the package."""

import argparse

from sage_unsloth.__main__ import run_command


def make_parser(name: str, about: str) -> argparse.ArgumentParser:
    """The parser of `python -m research.NAME`."""
    return argparse.ArgumentParser(prog=f"python -m research.{name}", description=about)


__all__ = ["make_parser", "run_command"]
