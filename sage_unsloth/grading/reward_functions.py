"""Custom rewards, in addition to the checked answer or instead of it.

A reward is a function in TRL's form: `f(prompts, completions, **columns) -> list[float]`, where
`prompts` and `completions` are conversations and each column of the data is a list with a value per
completion. The total reward is the weighted sum. A reward may be None for a completion, and then
does not count.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sage_unsloth.grading.checker import Grade
from sage_unsloth.own_code import OwnFunction, function_record, named_function

ANSWER = "answer"
"""Name of the checked answer among rewards: 1 if correct, else 0."""
OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric")
GIVEN = ("prompts", "completions", *OF_TRL)
"""Arguments that are not columns of the data."""
_RESERVED = {grade.value for grade in Grade}  # counts of these are logged under the same path


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward of a run.

    Attributes:
        function: your own function in TRL's form; None checks the answer.
        weight: factor in the total reward; with 0 the reward is only logged.
        name: name in the log; if empty, the function's name.
    """

    function: Callable[..., Any] | None = None
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ValueError(f"a reward's weight must be a number, got {weight!r}")
        if not math.isfinite(weight):
            raise ValueError(f"a reward's weight must be finite, got {weight}")
        if self.function is not None and not callable(self.function):
            raise ValueError(f"a reward must be a function, got {self.function!r:.200}")
        name = self.name or ANSWER
        if self.function is not None:
            name = self.name or getattr(self.function, "__name__", type(self.function).__name__)
            if name in _RESERVED or name == ANSWER:
                raise ValueError(
                    f"a reward's name must not be {ANSWER} or a grade ({', '.join(_RESERVED)}), "
                    f"got {name!r}. Rename the function, or give Reward(function=..., name=...)"
                )
        object.__setattr__(self, "name", name)

    @property
    def own(self) -> OwnFunction | None:
        """The function with its reference and the digest of its source."""
        return None if self.function is None else function_record(self.function)


def get_rewards(
    expected: Sequence[str | Callable[..., Any] | Reward] | None,
) -> tuple[Reward, ...]:
    """The rewards of a run; only the checked answer if none are named.

    Args:
        expected: `Reward`s, functions, or texts `answer` and `module:function`, optionally with
            `=WEIGHT` (default 1).

    Raises:
        ValueError: a text of another form, a function that cannot be imported, a repeated name, or
            only zero weights.
    """
    if expected is None or (not isinstance(expected, str) and not expected):
        return (Reward(),)
    if isinstance(expected, str):
        raise ValueError(f"rewards must be a list, got the text {expected!r}. Write [{expected!r}]")
    rewards = tuple(_reward(item) for item in expected)
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names):
        raise ValueError(
            f"rewards must have different names, got {', '.join(names)}. Rename a function, or "
            "give Reward(function=..., name=...)"
        )
    if not any(reward.weight for reward in rewards):
        raise ValueError(f"a reward's weight must not be 0, got {', '.join(names)} with 0")
    return rewards


def _reward(item: str | Callable[..., Any] | Reward) -> Reward:
    if isinstance(item, Reward):
        return item
    if not isinstance(item, str):
        return Reward(function=item)
    reference, equals, weight = item.partition("=")
    try:
        value = float(weight) if equals else 1.0
    except ValueError:
        raise ValueError(
            f"a reward is {ANSWER} or module:function, then =WEIGHT, got {item!r}, whose weight is "
            "not a number"
        ) from None
    if reference == ANSWER:
        return Reward(weight=value)
    return Reward(function=named_function(reference, "a reward").function, weight=value)


def recorded_rewards(rewards: Sequence[Reward]) -> list[dict[str, Any]] | None:
    """The rewards as in `run.json`; None for only the checked answer, which needs no record."""
    if [(reward.function, reward.weight) for reward in rewards] == [(None, 1.0)]:
        return None
    results = []
    for reward in rewards:
        own = reward.own
        source = {} if own is None else {"function": own.reference, "source": own.digest}
        results.append({"name": reward.name, "weight": float(reward.weight)} | source)
    return results


def check_columns_of(rewards: Sequence[Reward], columns: Mapping[str, Any]) -> None:
    """Raises ValueError if a function has a parameter that is not a column of the data.

    Args:
        columns: of the first row, as the trainer gets it.
    """
    for reward in rewards:
        if reward.function is None:
            continue
        there = sorted(set(columns) - {"prompt"})
        lacking = [name for name in columns_needed(reward.function) if name not in there]
        if lacking:
            known = ("prompts", "completions", *OF_TRL, *there)
            meant = [difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in lacking]
            guess = ", ".join(result for match in meant for result in match)
            others = [name for name, match in zip(lacking, meant, strict=True) if not match]
            read = ""
            if others:
                read = f"read a column of the data under that name (--columns {others[0]}=COLUMN), "
            advice = f"{read}rename the parameter, or give it a default"
            if not guess:
                advice = advice[0].upper() + advice[1:]
            raise ValueError(
                f"{reward.name} needs {', '.join(lacking)}, but the data have "
                f"{', '.join(there) or 'no column'} and TRL passes "
                f"{', '.join(('prompts', 'completions', *OF_TRL))}. "
                f"{f'Did you mean {guess}? Else ' if guess else ''}{advice}"
            )


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Raises ValueError for a function without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ValueError(f"a reward must have a signature, got {function!r:.200}") from None


def columns_needed(function: Callable[..., Any]) -> list[str]:
    """The parameters that must be columns of the data."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, parameter in parameters_of(function).items()
        if parameter.default is parameter.empty and parameter.kind in named and name not in GIVEN
    ]
