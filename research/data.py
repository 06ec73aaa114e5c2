"""The clone's data: base models of the research tasks, and committed results."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"

FRESH_MODEL = "arithmetic-fresh"
"""The folder of the base of `problems.fresh.ARITHMETIC`."""
COUNTDOWN_MODEL = "countdown-base"
"""The folder of the base of `problems.countdown`."""
FRESH_COUNTDOWN_MODEL = "countdown-fresh"
"""The folder of the base of `problems.fresh.COUNTDOWN`."""
