"""All rewards of a run together, for the trainer, the log and the preflight."""

from collections.abc import Mapping, Sequence
from typing import Any

from sage_unsloth.grading.checker import Checker, Grade, Kind, Verdict
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.own_reward import OwnReward
from sage_unsloth.grading.reward import SolutionReward
from sage_unsloth.grading.reward_functions import Reward, recorded_rewards

UNGRADED = Checker(
    name="unchecked",
    version=1,
    plainly=lambda answer, gold: Verdict(Grade.UNPARSABLE, Kind.NONE),
    gold_is_answer=False,
)
"""For runs whose rewards do not include the checked answer."""


class TotalReward:
    """The rewards of a run, each a function in TRL's form.

    Attributes:
        rewards: of `get_rewards`.
        functions: one for each: TRL's `reward_funcs`.
        weights: TRL's `reward_weights`; None if there is only the checked answer.
        solution: the checked answer; None if it is not among the rewards.

    Args:
        seconds: time limit of a call of a custom function.
    """

    def __init__(self, rewards: Sequence[Reward], grader: Grader, seconds: float) -> None:
        self.rewards = tuple(rewards)
        self.solution: SolutionReward | None = None
        self.functions: list[Any] = []
        for reward in rewards:
            if reward.function is None:
                self.solution = SolutionReward(grader)
                self.functions.append(self.solution)
            else:
                self.functions.append(OwnReward(reward, seconds))
        plain = recorded_rewards(rewards) is None
        self.weights = None if plain else [float(reward.weight) for reward in rewards]
        if self.solution is None:
            last = self.functions[-1]
            self.functions[-1] = _LastReward(last, self.functions)

    def total(self, values: Sequence[float | None]) -> float:
        """The total reward of a completion from its rewards."""
        weights = self.weights or [1.0]
        return sum(w * v for w, v in zip(weights, values, strict=True) if v is not None)

    @property
    def last_batch(self) -> list[dict]:
        """Rows of `completions.jsonl` for the last call.

        With custom rewards each row has `rewards` by name and the total `reward`.
        """
        if self.weights is None:
            assert self.solution is not None
            return self.solution.last_batch
        columns = [self._values(function) for function in self.functions]
        first = self.functions[0] if self.solution is None else self.solution
        names = [reward.name for reward in self.rewards]
        return [
            {key: value for key, value in row.items() if key != "reward"}
            | {"rewards": dict(zip(names, values, strict=True)), "reward": self.total(values)}
            for row, *values in zip(first.last_batch, *columns, strict=True)
        ]

    def _values(self, function: Any) -> list[float | None]:
        if function is self.solution:
            return [float(row["grade"] == Grade.CORRECT) for row in function.last_batch]
        return [row["reward"] for row in function.last_batch]

    def pop_counts(self) -> dict[str, int]:
        """`SolutionReward.pop_counts`; {} without the checked answer."""
        return {} if self.solution is None else self.solution.pop_counts()

    def pop_kinds(self) -> dict[str, int]:
        """`SolutionReward.pop_kinds`; {} without the checked answer."""
        return {} if self.solution is None else self.solution.pop_kinds()

    def pop_sums(self) -> dict[str, tuple[float, int]]:
        """name of a custom reward -> sum and count of its values since the last call."""
        return {
            reward.name: function.pop_mean()
            for reward, function in zip(self.rewards, self.functions, strict=True)
            if function is not self.solution
        }

    def of_records(
        self,
        prompts: Sequence[Any],
        records: Sequence[dict],
        columns: Mapping[str, Any],
    ) -> list[float]:
        """The total rewards of completions that are already graded, as in a preflight.

        Args:
            prompts: conversations.
            records: with `completion` and `grade`.
            columns: of the data, and what TRL passes besides; a value per completion.
        """
        completions = [[{"role": "assistant", "content": row["completion"]}] for row in records]
        graded = [float(row["grade"] == Grade.CORRECT) for row in records]
        values = [
            graded
            if function is self.solution
            else function(prompts=list(prompts), completions=completions, **columns)
            for function in self.functions
        ]
        # The sums of a preflight must not count in the first step.
        if self.weights is not None:
            self.pop_sums()
        return [self.total(row) for row in zip(*values, strict=True)]


class _LastReward(OwnReward):
    """The last function of a run without the checked answer.

    It is called last, so it can check that every completion got a reward.
    """

    def __init__(self, last: OwnReward, functions: Sequence[Any]) -> None:
        vars(self).update(vars(last))
        self._others = list(functions[:-1])

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        values = super().__call__(prompts, completions, **columns)
        others = [[row["reward"] for row in other.last_batch] for other in self._others]
        for place, row in enumerate(zip(values, *others, strict=True)):
            if all(value is None for value in row):
                names = ", ".join(function.name for function in (*self._others, self))
                raise ValueError(
                    "a reward may be None only where another one is a number, but completion "
                    f"{place} got None of {names}"
                )
        return values
