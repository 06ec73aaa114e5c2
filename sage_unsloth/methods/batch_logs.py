"""What a trainer and its reward functions log of a rollout batch, if part of it is replaced."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from sage_unsloth.trainers import trainer_names as names


def completion_lengths(trainer: Any, completion_ids: list[list[int]]) -> dict[str, float]:
    """Unsloth's metrics of a batch's completion lengths, in tokens."""
    ends = {*trainer.eos_token_ids, getattr(trainer, names.TOKENIZER).pad_token_id}
    lengths = [len(ids) for ids in completion_ids]
    # As Unsloth counts: a completion that ends in padding had an EOS before it.
    ended = [len(ids) for ids in completion_ids if ids[-1] in ends]
    values = {"completions/clipped_ratio": 1 - len(ended) / len(lengths)}
    for name, of in (("", lengths), ("terminated_", ended or [0])):
        values[f"completions/mean_{name}length"] = sum(of) / len(of)
        values[f"completions/min_{name}length"] = float(min(of))
        values[f"completions/max_{name}length"] = float(max(of))
    return values


@runtime_checkable
class KeepsLastBatch(Protocol):
    """A reward function that records and counts what it graded, as `grading.SolutionReward`."""

    last_batch: list[dict]

    def forget(self, dropped: Sequence[dict], batch: list[dict]) -> None:
        """Removes `dropped` from the counts; `batch` becomes `last_batch`."""
        ...


class RewardLogs:
    """Records of the graded completions, until it is known which are trained on."""

    def __init__(self, trainer: Any) -> None:
        self.columns = getattr(trainer, names.EXTRA_LOGS)
        self.extra = {name: list(values) for name, values in self.columns.items()}
        # TRL appends to the same lists when it grades the replacements.
        self.columns.clear()
        self.solutions = [r for r in trainer.reward_funcs if isinstance(r, KeepsLastBatch)]
        self.graded = [list(reward.last_batch) for reward in self.solutions]
        self.dropped: list[list[dict]] = [[] for _ in self.solutions]

    def put(self, places: list[int], new: "RewardLogs") -> None:
        """Puts the records of `new` in these places."""
        for name in new.extra.keys() - self.extra.keys():
            # A reward function may log a column for some completions only.
            self.extra[name] = [None] * (max(places) + 1)
        for name, values in self.extra.items():
            values += [None] * (max(places) + 1 - len(values))
            insert_values(values, places, new.extra.get(name, [None] * len(places)))
        for graded, dropped, of_new in zip(self.graded, self.dropped, new.graded, strict=True):
            dropped += [graded[place] for place in places]
            insert_values(graded, places, of_new)

    def keep(self) -> None:
        """Returns the remaining records to trainer and reward functions."""
        self.columns.update(self.extra)
        for reward, graded, dropped in zip(self.solutions, self.graded, self.dropped, strict=True):
            reward.forget(dropped, graded)


def insert_values(values: list | None, places: list[int], new: list | None) -> None:
    """Puts the values of `new` in these places; None is a list that does not exist."""
    if values is not None:
        for place, value in zip(places, new or [], strict=True):
            values[place] = value
