"""The tasks of the benchmark: problems, model, settings. Your own is another `Task`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from research.data import COUNTDOWN_MODEL, DATA, FRESH_COUNTDOWN_MODEL, FRESH_MODEL
from research.problems import arithmetic_forms, arithmetic_fresh, countdown, countdown_fresh
from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.countdown import COUNTDOWN
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.models.embedded import BASE_MODEL
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.subsets import over_families
from sage_unsloth.quickstart import QuickstartConfig
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig

ARITHMETIC_ALGORITHMS = (
    "grpo", "grpo-no-kl", "grpo-forward-kl", "grpo-reverse-kl",
    "sage-random", "sage-token", "sage-branch",
    "grpo-exact", "sage-branch-exact", "bnpo-no-kl", "bnpo-sage-branch",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Problems that every trained model answers.

    Attributes:
        rows: with `id`, `problem`, `answer` and `family`; and `unit`, where several problems count
            as one.
        num_samples: of each problem.
        checker: what makes an answer right.
        max_completion_length: tokens; None takes that of the task's `sampling`.
    """

    title: str
    rows: Sequence[dict]
    num_samples: int
    checker: Checker = MATH
    max_completion_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One model, its problems, and the settings that all algorithms share.

    Attributes:
        name: as given to `--task`.
        title: for tables and figures.
        prepare: from a cache folder to the base model's; called once, before anything is trained.
        sft_rows, train_rows: of the two stages.
        sets: name -> problems to answer; the first, "test", is what claims are about, the others
            are out of distribution.
        sft, rlvr, sampling: settings; the RL seed, and what an algorithm sets, are each run's own.
        route: the way that a completion takes, where that can be told from its text.
        rare_route: the one that the base model seldom takes.
        checker: what makes an answer right in training.
        algorithms: the default set.
        num_seeds: training seeds of each, by default.
        grid_seeds: training seeds of the threshold × ratio grid; 0 leaves it out.
        seconds: of one optimizer step and of one completion in the evaluation, measured on an idle
            core, for the estimate.
    """

    name: str
    title: str
    prepare: Callable[[Path], Path]
    sft_rows: Sequence[dict]
    train_rows: Sequence[dict]
    sets: Mapping[str, EvaluationSet]
    sft: SftConfig
    rlvr: RlvrConfig
    sampling: SamplingConfig
    route: Callable[[str], str] | None = None
    rare_route: str | None = None
    checker: Checker = MATH
    algorithms: tuple[str, ...]
    num_seeds: int
    grid_seeds: int = 0
    seconds: Mapping[str, float]


def get_task(name: str, *, smoke: bool = False) -> Task:
    """The task of that name, or the same at a size that only shows that everything works.

    Raises:
        ValueError: there is none.
    """
    if name not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}; got {name!r}")
    task = TASKS[name]()
    return _smoke(task) if smoke else task


def arithmetic_task() -> Task:
    """The embedded task, trained more gently than in the quickstart.

    At the quickstart's learning rate of 2e-3 the reward is saturated after 25 of 100 steps, and
    which ways survive from there on is chance: three seeds have a standard deviation of .09 at
    pass@16, in which a difference of .03 is lost.
    """
    setup = QuickstartConfig()
    return Task(
        name="arithmetic",
        title="embedded arithmetic, 0.7 M parameters",
        prepare=lambda cache: DATA / BASE_MODEL,
        sft_rows=arithmetic.problems("sft"),
        train_rows=arithmetic.problems("train"),
        sets={
            "test": EvaluationSet(
                title="held-out problems", rows=arithmetic.problems("test"), num_samples=32
            ),
            "swapped": EvaluationSet(
                title="factor first (6*17=?)",
                rows=over_families(arithmetic_forms.swapped_problems(), 50),
                num_samples=16,
            ),
            "round": EvaluationSet(
                title="round numbers (60*7=?)",
                rows=over_families(arithmetic_forms.round_problems(), 36),
                num_samples=16,
            ),
        },
        sft=setup.sft,
        rlvr=replace(setup.rlvr, max_steps=50, learning_rate=1e-3, sample_steps=0, save_steps=25),
        sampling=setup.sampling,
        route=arithmetic.route,
        rare_route="round-up",
        algorithms=ARITHMETIC_ALGORITHMS,
        num_seeds=8,
        grid_seeds=3,
        seconds={"step": 1.3, "completion": 0.0065},
    )


def arithmetic_fresh_task() -> Task:
    """The embedded task on problems, and with a base model, that nothing else was tried on."""
    return replace(
        arithmetic_task(),
        name="arithmetic-fresh",
        title="embedded arithmetic drawn anew, 0.7 M parameters",
        prepare=lambda cache: DATA / FRESH_MODEL,
        sft_rows=arithmetic_fresh.problems("sft"),
        train_rows=arithmetic_fresh.problems("train"),
        sets={
            "test": EvaluationSet(
                title="held-out problems", rows=arithmetic_fresh.problems("test"), num_samples=32
            )
        },
        grid_seeds=0,
    )


def countdown_task() -> Task:
    """Reaching a target with four numbers, on a tiny base model of its own."""
    arithmetic_like = arithmetic_task()
    return replace(
        arithmetic_like,
        name="countdown",
        title="embedded countdown, 0.7 M parameters",
        prepare=lambda cache: DATA / COUNTDOWN_MODEL,
        sft_rows=countdown.problems("sft"),
        train_rows=countdown.problems("train"),
        sets={
            "test": EvaluationSet(
                title="held-out problems",
                rows=countdown.problems("test"),
                num_samples=32,
                checker=COUNTDOWN,
            )
        },
        checker=COUNTDOWN,
        sft=replace(arithmetic_like.sft, max_steps=120, learning_rate=1e-3),
        route=countdown.route,
        rare_route="bracket",
        grid_seeds=0,
    )


def countdown_fresh_task() -> Task:
    """Countdown on problems, and with a base model, that nothing else was tried on."""
    first = countdown_task()
    test = replace(first.sets["test"], rows=countdown_fresh.problems("test"))
    return replace(
        first,
        name="countdown-fresh",
        title="embedded countdown drawn anew, 0.7 M parameters",
        prepare=lambda cache: DATA / FRESH_COUNTDOWN_MODEL,
        sft_rows=countdown_fresh.problems("sft"),
        train_rows=countdown_fresh.problems("train"),
        sets={"test": test},
    )


def _smoke(task: Task) -> Task:
    sets = {
        name: replace(item, rows=over_families(list(item.rows), 3), num_samples=4)
        for name, item in task.sets.items()
    }
    few = {"max_steps": 2, "prompts_per_step": 2, "num_generations": 4, "save_steps": 1}
    return replace(
        task,
        sets=sets,
        sft=replace(task.sft, max_steps=2, batch_size=4),
        rlvr=replace(task.rlvr, **few),
        sampling=replace(task.sampling, batch_size=32),
        grid_seeds=min(task.grid_seeds, 1),
    )


TASKS: dict[str, Callable[[], Task]] = {
    "arithmetic": arithmetic_task,
    "arithmetic-fresh": arithmetic_fresh_task,
    "countdown": countdown_task,
    "countdown-fresh": countdown_fresh_task,
}
