"""The answer inside a completion's solution tag."""

import re

from sage_unsloth.prompts import SOLUTION_END, SOLUTION_START


def extract_answer(completion: str, *, boxed: bool = False) -> str | None:
    r"""The stripped text of the last complete solution tag, or None where there is none.

    An empty tag is the answer "". With `boxed`, a completion without a complete tag falls back to
    its last `\boxed{}`.
    """
    start = completion.rfind(SOLUTION_START, 0, max(completion.rfind(SOLUTION_END), 0))
    if start >= 0:
        start += len(SOLUTION_START)
        return completion[start : completion.find(SOLUTION_END, start)].strip()
    brace = completion.rfind(r"\boxed{") + len(r"\boxed") if boxed else -1
    end = closing_brace(completion, brace) if completion[brace : brace + 1] == "{" else None
    return None if end is None else completion[brace + 1 : end].strip()


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace opened at `start` is closed, or None; escaped braces do not count."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return match.start()
    return None
