"""Dialects of the arithmetic language in which one way forks: it writes free letters.

    17=20-3;kqfx;20*6=120;3*6=18;120-18=102     four letters of twelve after the first step

A free letter is a choice that decides nothing: its entropy is ln 12 = 2.48 nats, so the guide
Branch (threshold 1.2, ratio .3) has q = 1.38 there, and Σ log q = 1.30 for the four. So the guide
pays for the way that writes them, whether it is right or not:

    fork        the rare way, rounding up, writes them: the guide pays for what should survive
    fork-twin   the wrong way, any other split, writes them: the guide pays for mistakes

Problems, splits and test are those of `fresh.ARITHMETIC`; the base model is its base, trained on
with the dialect's corpus (`python -m research.pretrain`).
"""

import random
from collections.abc import Sequence
from typing import Any

from research.problems.fresh import ARITHMETIC
from sage_unsloth.problems import arithmetic

LETTERS = "cfhjkmqsvxyz"  # no two of them are one token
NUM_LETTERS = 4
WAYS = {"fork": "round-up", "fork-twin": "other"}
"""Dialect -> the way that writes the letters."""
LETTERS_SEED = 3411


class Dialect:
    """One dialect, as a language module is used: documents of its corpus, and its problems."""

    def __init__(self, name: str):
        self.SOURCE = name
        self.way = WAYS[name]
        self.ROUTES = arithmetic.ROUTES
        self.LETTERS = LETTERS
        self.NUM_LETTERS = NUM_LETTERS

    def document(
        self, tokenizer: Any, rng: random.Random, pairs: Sequence[tuple[int, int]] = ()
    ) -> tuple[str, str]:
        """As `arithmetic.document`, with the letters where the working takes the forked way."""
        context, text = arithmetic.document(tokenizer, rng, pairs)
        # drills have no context and no way
        return context, with_letters(text, self.way, rng) if context else text

    def problems(self, split: str) -> list[dict]:
        """As `fresh.ARITHMETIC.problems`; the solutions for SFT have the letters."""
        rng = random.Random(LETTERS_SEED)
        rows = ARITHMETIC.problems(split)
        if split != "sft":
            return rows
        return [row | {"solution": with_letters(row["solution"], self.way, rng)} for row in rows]


def with_letters(text: str, way: str, rng: random.Random) -> str:
    """The text with `NUM_LETTERS` free letters after its first step, if it takes that way."""
    if arithmetic.route(text) != way:
        return text
    first, rest = text.split(";", 1)
    return f"{first};{''.join(rng.choices(LETTERS, k=NUM_LETTERS))};{rest}"


DIALECTS = {name: Dialect(name) for name in WAYS}
