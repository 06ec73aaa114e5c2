"""Dynamic sampling (DAPO, arXiv 2503.14476): replaces prompts whose completions got equal rewards.

A group with equal rewards has advantage 0 and no signal; under another rule (`advantages_by`) these
are the groups with zero advantages under that rule. While `dynamic_sampling` is open, the dead
groups of a rollout batch are sampled again for other prompts of the training set, at most
`max_resamples` times:

    generate all groups, grade → dead groups → other prompts, generate and grade these groups alone
    → dead groups → …

Differs from DAPO: the batch keeps its size, and a group that is still dead after the last attempt
stays in it; DAPO samples until every group has a signal. A replacement prompt also comes up in its
own turn, so the data order of the steps does not change.

It happens inside the trainer's own `_generate_and_score_completions`, before anything is scored:
the replaced groups' values are put into the lists that `_generate` returns, and into the rows and
prompts for rewards and logs. Everything after that, including the reference scoring, happens once,
on the final batch.

Cost: each attempt is one generation of the dead groups, as long as its longest completion. On a GPU
generation time grows less than in proportion to the batch, so an attempt can take nearly as long as
the first generation: up to 1 + `max_resamples` times the generation, plus grading. The gradient
pass costs the same.
"""

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sage_unsloth.methods.batch_logs import RewardLogs, completion_lengths, insert_values
from sage_unsloth.methods.group_rewards import dead_groups, total_rewards
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import inside, listening
from sage_unsloth.trainers.trainer_names import ContractError

SAMPLING_PARAMETERS = {
    names.GENERATE: ("self", "prompts"),
    names.REWARDS: ("self", "inputs", "prompts", "completions", "completion_ids_list"),
}
PER_COMPLETION = (0, 1, 3, 4)
"""Places in the result of `_generate`: prompt ids, completion ids, completions, sampling
log-probabilities (None without vLLM).
"""
EMPTY = (2, 5, 6, 7)
"""Places for tools, a rollout function and images: not supported, so None or empty."""
IMAGE_COLUMNS = {"image", "images", "video", "videos", "audio", "audios"}


@contextmanager
def dynamic_sampling(trainer: Any, max_resamples: int) -> Iterator[None]:
    """Within this context, dead groups are replaced by groups of other prompts.

        with dynamic_sampling(trainer, max_resamples=3), guided_kl(trainer, BranchGuide()):
            trainer.train()

    A group is dead if all its advantages are 0. Nests with `guided_kl` in either order; evaluation
    is not changed. A replacement prompt is new to the batch as long as the dataset has others. It
    depends only on `trainer.args.seed`, the optimizer step, the batch within the step, the attempt
    and the batch's prompts, so a resumed run chooses the same prompts. Each rollout batch logs

        sampling/resampled_groups   replaced groups, over all attempts
        sampling/dead_groups        share of dead groups in the batch that is trained on; equal to
                                    `frac_reward_zero_std`, unless that is of the whole batch
                                    (scale_rewards="batch") or another rule is in force

    Unsloth's `completions/*`, the counts of `SolutionReward` and columns that a reward logs
    describe the completions that are trained on; `num_tokens` counts all generated ones, and a
    scalar that a reward logs (`log_metric`) averages over all graded ones.

    Args:
        trainer: a GRPO trainer in one process, without tools, environments, rollout function or
            images.
        max_resamples: attempts for a rollout batch; 0 replaces nothing.

    Raises:
        ValueError: `max_resamples` is negative, or the trainer or its dataset is not supported.
        ContractError: the trainer's functions differ, or another `dynamic_sampling` is open.
    """
    if max_resamples < 0:
        raise ValueError(f"max_resamples must be >= 0, got {max_resamples}")
    if max_resamples == 0:
        yield
        return
    _check_trainer(trainer)
    _check_functions(trainer)
    batches = _Batches(trainer, max_resamples)
    listeners = {
        names.ROLLOUT: batches.score,
        names.GENERATE: batches.generate,
        names.REWARDS: batches.grade,
    }
    with listening(trainer, "resampling", **listeners):
        yield


class _Batches:
    """State of the three listeners: the rollout batch in progress."""

    def __init__(self, trainer: Any, max_resamples: int) -> None:
        self.trainer = trainer
        self.max_resamples = max_resamples
        self.rows: list[dict] | None = None
        self.made: tuple[list, list, Tensor] | None = None
        self._moment = -1
        self._number = 0

    def score(self, proceed: Callable[..., dict], inputs: list[dict]) -> dict[str, Any]:
        """`_generate_and_score_completions` on rows that may be replaced while it runs."""
        if not self.trainer.model.training:
            return proceed(inputs)
        step = self.trainer.state.global_step
        # Several rollout batches can belong to one optimizer step; the draw of each is its own.
        self._number = self._number + 1 if self._moment == step else 0
        self._moment = step
        self.rows, self.made = list(inputs), None
        try:
            batch = proceed(self.rows)
            # `grade` sets both to None, so what is left was not used.
            if self.made is not None or self.rows is not None:
                raise ContractError(
                    f"{names.ROLLOUT} must call {names.GENERATE} and {names.REWARDS} once each",
                    actual="one of them was not called",
                    expected="both",
                )
        finally:
            self.rows = self.made = None
        return batch

    def generate(self, proceed: Callable[..., tuple], prompts: list) -> tuple:
        """`_generate`, repeated for groups without a signal; changes `prompts` and the rows too."""
        if self.rows is None:
            return proceed(prompts)
        rows, metrics = self.rows, names.metrics_of(self.trainer, "train")
        size = self.trainer.num_generations
        self._check_groups(rows, prompts, size)
        # TRL logs lengths while it generates; after a replacement those entries are written again.
        logged = {name: len(values) for name, values in metrics.items()}
        result = self._generated(prompts)
        self._check_lengths(result[1], logged)
        rewards, graded = self._graded(rows, prompts, result)
        seen, resampled = {repr(prompt) for prompt in prompts}, 0
        dead = dead_groups(self.trainer, total_rewards(self.trainer, rewards))
        for attempt in range(self.max_resamples):
            drawn = self._draw(len(dead), attempt, seen)
            if not drawn:
                break
            # The dataset may have fewer new prompts than there are dead groups, so the first ones
            # go.
            places = [p for g in dead[: len(drawn)] for p in range(g * size, (g + 1) * size)]
            new_rows = [dict(row) for row in drawn for _ in range(size)]
            new_prompts = [row["prompt"] for row in new_rows]
            new = self._generated(new_prompts)
            new_rewards, new_graded = self._graded(new_rows, new_prompts, new)
            for i in PER_COMPLETION:
                insert_values(result[i], places, new[i])
            insert_values(rows, places, new_rows)
            insert_values(prompts, places, new_prompts)
            graded.put(places, new_graded)
            rewards[places] = new_rewards
            resampled += len(drawn)
            dead = dead_groups(self.trainer, total_rewards(self.trainer, rewards))
        graded.keep()
        if resampled:
            for name, value in completion_lengths(self.trainer, result[1]).items():
                # One value for the batch that is trained on, in place of one for each attempt.
                metrics[name][logged.get(name, 0) :] = [value]
        metrics["sampling/resampled_groups"].append(float(resampled))
        metrics["sampling/dead_groups"].append(len(dead) * size / len(rows))
        self.made = (prompts, result[3], rewards)
        return tuple(result)

    def grade(
        self,
        proceed: Callable[..., Tensor],
        inputs: list,
        prompts: list,
        completions: list,
        completion_ids: list,
    ) -> Tensor:
        """`_calculate_rewards`; the rewards of a batch by `generate` are already known."""
        if self.made is None:
            return proceed(inputs, prompts, completions, completion_ids)
        made_prompts, made_completions, rewards = self.made
        # Identity: equal lists could still be copies that TRL goes on to change.
        given = (inputs is self.rows, prompts is made_prompts, completions is made_completions)
        if not all(given):
            raise ContractError(
                f"{names.ROLLOUT} must pass the rows, the prompts and the completions that it has "
                f"on to {names.REWARDS}",
                actual=f"the same rows, prompts, completions: {given}",
                expected="the same lists",
            )
        self.rows = self.made = None
        return rewards

    def _generated(self, prompts: list) -> list:
        """The result of `_generate`, checked to be lists with a value per completion."""
        result = list(inside(self.trainer, names.GENERATE, "resampling")(prompts))
        sizes = {
            i: None if result[i] is None else len(result[i])
            for i in PER_COMPLETION
            if i < len(result)
        }
        lists = all(isinstance(result[i], list) or result[i] is None for i in sizes)
        if (
            len(result) != 8
            or not lists
            or set(sizes.values()) - {len(prompts), None}
            or any(result[i] for i in EMPTY)
        ):
            raise ContractError(
                f"{names.GENERATE} must return prompt ids, completion ids, no tool mask, "
                "completions, log-probabilities or None, no extra fields and no images, each a "
                "list of a value per completion",
                actual=[type(value).__name__ for value in result] + [sizes],
                expected=f"lists of {len(prompts)}",
            )
        return result

    def _graded(self, rows: list, prompts: list, result: list) -> tuple[Tensor, RewardLogs]:
        grade = inside(self.trainer, names.REWARDS, "resampling")
        rewards = grade(rows, prompts, result[3], result[1])
        if rewards.shape != (len(rows), len(self.trainer.reward_funcs)):
            raise ContractError(
                f"{names.REWARDS} must return a reward for each completion and function",
                actual=tuple(rewards.shape),
                expected=(len(rows), len(self.trainer.reward_funcs)),
            )
        return rewards, RewardLogs(self.trainer)

    def _draw(self, count: int, attempt: int, seen: set[str]) -> list[dict]:
        """Rows with prompts that are not in `seen`, which is updated; others only if there are too
        few.
        """
        data, chosen, spare = self.trainer.train_dataset, [], []
        if count == 0:
            return []
        # No generator of torch: a resumed run has another state of it, but the same key.
        key = (self.trainer.args.seed, self._moment, self._number, attempt)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        generator = random.Random(int.from_bytes(digest, "little"))
        # All of the dataset in random order, and stop early: rows with a prompt in the batch are
        # skipped.
        for index in generator.sample(range(len(data)), len(data)):
            row = data[index]
            prompt = repr(row["prompt"])
            (spare if prompt in seen else chosen).append(row)
            seen.add(prompt)
            if len(chosen) == count:
                break
        return chosen + spare[: count - len(chosen)]

    def _check_lengths(self, completion_ids: list, logged: dict[str, int]) -> None:
        """Checks that `completion_lengths` computes what Unsloth logged, before replacing it."""
        metrics = names.metrics_of(self.trainer, "train")
        result = {
            name: values[-1]
            for name, values in metrics.items()
            if name.startswith("completions/") and len(values) > logged.get(name, 0)
        }
        expected = completion_lengths(self.trainer, completion_ids)
        if result.keys() != expected.keys() or any(
            abs(result[name] - value) > 1e-4 * max(1.0, value) for name, value in expected.items()
        ):
            raise ContractError(
                f"{names.GENERATE} must log the lengths of its completions as before",
                actual=result,
                expected=expected,
            )

    def _check_groups(self, rows: list[dict], prompts: list, size: int) -> None:
        same = [row["prompt"] == rows[i - i % size]["prompt"] for i, row in enumerate(rows)]
        if (
            len(rows) % size
            or len(prompts) != len(rows)
            or not all(same)
            or prompts != [row["prompt"] for row in rows]
        ):
            raise ContractError(
                "the completions of a prompt must be side by side in the rollout batch, and "
                "prompts must be the rows' own",
                actual=f"{len(prompts)} prompts of {len(rows)} rows that change otherwise",
                expected=f"blocks of {size} rows with one prompt",
            )


def _check_trainer(trainer: Any) -> None:
    """Raises ValueError unless a batch is only lists with a value per completion."""
    processes = trainer.accelerator.num_processes
    if processes != 1:
        raise ValueError(
            "dynamic_sampling needs a single process, because groups may be split between several, "
            f"got {processes}"
        )
    if trainer.tools or trainer.environment_factories or trainer.rollout_func:
        raise ValueError(
            "dynamic_sampling generates as the trainer does, without tools, environments or a "
            f"rollout function, got tools={trainer.tools}, "
            f"environments={trainer.environment_factories}, rollout_func={trainer.rollout_func}"
        )
    data = trainer.train_dataset
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise ValueError(
            "dynamic_sampling needs a training dataset with a length and rows, got "
            f"{type(data).__name__}. Load it as a datasets.Dataset"
        )
    images = IMAGE_COLUMNS & set(getattr(data, "column_names", None) or ())
    if images:
        raise ValueError(
            "dynamic_sampling is for text only, but the training dataset has the columns "
            f"{sorted(images)}"
        )
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "dynamic_sampling needs the sum of the rewards, so multi_objective_aggregation must be "
            f"'sum_then_normalize', got {trainer.multi_objective_aggregation!r}"
        )


def _check_functions(trainer: Any) -> None:
    """Raises ContractError for other parameters; calls are checked after each batch."""
    for name, expected in SAMPLING_PARAMETERS.items():
        function = getattr(type(trainer), name, None)
        result = None if function is None else tuple(inspect.signature(function).parameters)
        if result != expected:
            raise ContractError(
                f"{name} of the trainer must have these parameters",
                actual=result,
                expected=expected,
            )
