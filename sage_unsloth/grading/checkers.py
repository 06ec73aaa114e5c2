"""Checkers for knights and knaves, and for reasoning-gym."""

import contextlib
import functools
import json
import re

from sage_unsloth.grading.checker import LONGEST_ANSWER, Checker, Grade, Kind, Verdict
from sage_unsloth.grading.mathematics import unwrap

ROLES_INSTRUCTION = (
    "State the role of every person, each as `NAME is a knight` or `NAME is a knave`, "
    "separated by commas."
)
_ROLE = re.compile(
    r"(?:\(?\d+[.):]\s*)?"  # the number of a line
    r"(?P<name>[^\W\d_][\w' -]*?)"
    r"\s*(?:\bis\b|:|=|-)\s*(?:an?\s+|the\s+)?"
    r"(?P<role>knight|knave)\.?",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\\(?:text|mathrm|textbf)(?=\{)|[*${}`]|\\(?=\s)|\\\\")


def roles(text: str) -> dict[str, str] | None:
    """Each person's role by name in lower case; None for any other text.

    Accepts "Zoey is a knave, and Oliver is a knight", "Zoey: knave; Oliver: knight" and numbered
    lines, in any order. None if a part states no role, or a person gets two.
    """
    if len(text) > LONGEST_ANSWER:
        return None
    text = _MARKUP.sub("", text)
    result: dict[str, str] = {}
    for part in re.split(r"[,;\n]|\band\b", text):
        if not (part := part.strip()):
            continue
        match = _ROLE.fullmatch(part)
        if match is None:
            return None
        name, role = match["name"].lower(), match["role"].lower()
        if result.setdefault(name, role) != role:
            return None
    return result or None


def _check_roles(answer: str | None, gold: str) -> Verdict:
    expected = roles(gold) if isinstance(gold, str) else None
    if expected is None:
        raise ValueError(
            f"a gold answer must state roles, as `A is a knight, B is a knave`, got {gold!r:.200}"
        )
    result = None if answer is None else roles(answer)
    if result is None:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    return Verdict(Grade.CORRECT if result == expected else Grade.WRONG, Kind.ROLES)


ROLES = Checker(name="roles", version=1, plainly=_check_roles)


def _check_length(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    _gym_item(gold)
    if not answer or len(answer) > LONGEST_ANSWER:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    return answer, gold


def compare_reasoning_gym(answer: str, gold: str) -> Verdict | None:
    """Scores an answer with reasoning-gym's own scorer, in a worker.

    CORRECT at the full score, with or without dollars, bold or box. Partial scores are WRONG:
    half-correct roles score .65 there. UNPARSABLE if the scorer raises.

    Args:
        gold: JSON of `reasoning_gym_gold`, or {"task": name, "entry": an entry of its data}.

    Returns:
        None if the gold is invalid.
    """
    import reasoning_gym  # noqa: F401  (a missing package must not look like a bad gold)

    try:
        item = _gym_item(gold)
    except ValueError:
        return None
    if "entry" in item:
        entry, data = item["entry"], _reasoning_gym(item["task"], 1, 0)
    else:
        data = _reasoning_gym(item["task"], item["size"], item["seed"])
        entry = data[item["index"]]
        # Another version of reasoning-gym may make another item from the same seed.
        if entry["answer"] != item["answer"]:
            return None
    scores = []
    for text in dict.fromkeys((answer, unwrap(answer))):
        # One generator's scorer raises ValueError on a text that it does not understand, the next
        # TypeError.
        with contextlib.suppress(Exception):
            scores.append(data.score_answer(answer=text, entry=entry))
    if not scores:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    return Verdict(Grade.CORRECT if max(scores) >= 1 else Grade.WRONG, Kind.SCORER)


def _gym_item(gold: str) -> dict:
    """The gold as a dict; ValueError for another form."""
    try:
        item = json.loads(gold)
    except (ValueError, TypeError):
        item = None
    if isinstance(item, dict) and "task" in item:
        if {"size", "seed", "index", "answer"} <= item.keys():
            return item
        if isinstance(item.get("entry"), dict) and {"answer", "metadata"} <= item["entry"].keys():
            return item
    raise ValueError(
        'a gold of reasoning-gym must be JSON text, {"task": NAME, "entry": {"question", "answer", '
        f'"metadata"}}}}, got {gold!r:.200}'
    )


@functools.lru_cache(maxsize=8)
def _reasoning_gym(task: str, size: int, seed: int):
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=size, seed=seed)


def reasoning_gym_gold(task: str, size: int, seed: int, index: int, answer: str) -> str:
    """What a worker needs to make the item again and to check that it is the same."""
    return json.dumps({"task": task, "size": size, "seed": seed, "index": index, "answer": answer})


REASONING_GYM = Checker(
    name="reasoning-gym",
    version=1,
    packages=("reasoning-gym",),
    plainly=_check_length,
    gold_is_answer=False,
    compare="sage_unsloth.grading.checkers:compare_reasoning_gym",
)
