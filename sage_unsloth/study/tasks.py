"""What a study trains and asks: a model, its training rows, benchmarks, and shared settings."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.reward_functions import get_rewards
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.embedded import BASE_MODEL, data_folder, is_small
from sage_unsloth.models.templates import choose_format
from sage_unsloth.models.tokenizers import open_tokenizer
from sage_unsloth.own_code import describe_exception, named_object
from sage_unsloth.planning.fitting import check_fits, memory_of_card
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.benchmarks import Benchmark, load_benchmark
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.corpora import rl_corpus, rl_rows
from sage_unsloth.problems.corpus import Corpus
from sage_unsloth.problems.own_data import read_raw
from sage_unsloth.problems.subsets import over_families
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.sampling.engines import BATCH_SIZES, SamplingConfig
from sage_unsloth.training import embedded_settings
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig
from sage_unsloth.training.starting import (
    SMOKE,
    merge_run,
    rlvr_config,
    run_setup,
    starting_point,
)

ANSWERS = "answers"
"""The guesser who answers with the answer of a training row, drawn at random."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One model, its problems, and the settings that all points share; it travels to processes.

    Attributes:
        name, title: for records and for figures.
        model, adapter: below the trained adapter, and an adapter to train further. With `sft` the
            model is the base of it.
        rows: of RL.
        benchmarks: what every model is asked. Their rows may have `family` (a group of problems),
            `unit` (several problems that count as one) and `guess` (the chance of a blind attempt).
        rlvr, sampling: settings; `sampling.num_samples` is n of every trained model.
        common: settings that replace those of every algorithm.
        verifier, rewards: of training, as `rlvr` takes them.
        sft, sft_rows: a first stage, run once; None where the model is ready.
        seconds: `step` and `completion` where every core has a run, for the first estimate.
        data: where the rows are from, for the record.
        prompt, template: how models are asked.
        smoke: train although the preflight finds nothing to learn from.
    """

    name: str
    title: str
    model: str
    adapter: str | None = None
    rows: Sequence[dict]
    benchmarks: tuple[Benchmark, ...]
    rlvr: RlvrConfig
    sampling: SamplingConfig
    common: Mapping[str, Any] = field(default_factory=dict)
    verifier: Checker = MATH
    rewards: tuple[str, ...] | None = None
    sft: SftConfig | None = None
    sft_rows: Sequence[dict] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    prompt: PromptFormat | None = None
    template: str | None = None
    smoke: bool = False

    @property
    def is_small(self) -> bool:
        return is_small(self.model)

    @property
    def num_problems(self) -> int:
        return sum(len(benchmark.rows) for benchmark in self.benchmarks)


def get_task(name: str) -> Task:
    """An embedded task, or `module:name` of a function that returns a `Task`.

    Raises:
        ValueError: there is none.
    """
    if name in TASKS:
        return TASKS[name]()
    if ":" not in name:
        raise ValueError(
            f"--task must be one of {', '.join(TASKS)}, or module:name of your own, got {name!r}"
        )
    try:
        task = named_object(name, "a task")()
    except Exception as error:  # also of a function that needs arguments
        raise ValueError(
            "a task of your own must return a Task without arguments, but "
            f"{name} raised {describe_exception(error)}"
        ) from error
    if not isinstance(task, Task):
        raise ValueError(
            f"a task of your own must return a Task, but {name} returned {task!r:.100}"
        )
    return task


def shrink(task: Task) -> Task:
    """The same at a size that only checks that everything works; its figures mean nothing."""
    # Groups keep their size: a method's k may need it.
    few = {"max_steps": 2, "prompts_per_step": 2, "save_steps": 1}
    benchmarks = tuple(
        replace(benchmark, rows=_few(benchmark.rows)) for benchmark in task.benchmarks[:1]
    )
    return replace(
        task,
        benchmarks=benchmarks,
        sft=task.sft and replace(task.sft, max_steps=2, batch_size=4),
        rlvr=replace(task.rlvr, **few),
        common={name: value for name, value in task.common.items() if name not in few},
        sampling=replace(task.sampling, num_samples=8, batch_size=32),
        smoke=True,
    )


def _few(rows: list[dict]) -> list[dict]:
    return over_families(rows, 4) if all("family" in row for row in rows) else rows[:4]


def arithmetic_task() -> Task:
    """The embedded task, trained more gently than in the quickstart.

    At the quickstart's learning rate of 2e-3 the reward is saturated after 25 of 100 steps, and
    which ways survive from there on is chance.
    """
    rows = [row | {"guess": guess_product(row)} for row in arithmetic.problems("test")]
    return Task(
        name="arithmetic",
        title="embedded arithmetic, 0.7 M parameters",
        model=str(data_folder() / BASE_MODEL),
        rows=arithmetic.problems("train"),
        benchmarks=(Benchmark(name="test", rows=rows, provenance=[{"embedded": "test"}]),),
        rlvr=replace(
            embedded_settings.RLVR,
            max_steps=50,
            learning_rate=1e-3,
            sample_steps=0,
            save_steps=25,
        ),
        sampling=replace(embedded_settings.SAMPLING, num_samples=64),
        sft=embedded_settings.SFT,
        sft_rows=arithmetic.problems("sft"),
        seconds={"step": 2.5, "completion": 0.011},
    )


def guess_product(row: Mapping[str, Any]) -> float:
    """The chance of answering with the product of another problem of the arithmetic language."""
    products = Counter(number * factor for number, factor in arithmetic.all_pairs())
    return products[int(row["answer"])] / products.total()


TASKS: dict[str, Callable[[], Task]] = {"arithmetic": arithmetic_task}


def own_task(
    *,
    start: str | Path,
    data: str,
    benchmarks: Sequence[str],
    columns: Columns | None = None,
    verifier: str | None = None,
    rewards: Sequence[str] | None = None,
    group: str | None = None,
    guess: str = ANSWERS,
    prompt: PromptFormat | None = None,
    template: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    smoke: bool = False,
    show: Callable[[str], object] = print,
    **settings: Any,
) -> Task:
    """A task of a user's own model and data, read as `train` and `evaluate` read them.

    Args:
        start: see `train --from`.
        data: training rows, see `train --data`.
        benchmarks: NAME=FILE or a name that `evaluate --benchmarks` takes.
        columns, verifier, prompt, template: as for both commands.
        rewards: as for `train`; None for the checked answer alone.
        group: column of the benchmarks' rows whose values are reported apart.
        guess: the chance of a blind attempt: a number, a column, or `answers`, which answers with
            the answer of a training row.
        sampling: fields of `SamplingConfig`.
        smoke: a size that only checks that everything works.
        show: is given what was read.
        settings: fields of `RlvrConfig`, in place of the preset's and of every algorithm's.

    Raises:
        ValueError: as `train` and `evaluate` do, before anything is trained.
    """
    point = starting_point(start, settings.get("reference", RlvrConfig.reference))
    gib = memory_of_card(None)
    # Groups keep their size: a method's k may need it.
    few = {name: value for name, value in SMOKE["rlvr"].items() if name != "num_generations"}
    changes = (few if smoke else {}) | settings
    config = rlvr_config(point.preset, gib, None, **changes)
    config = replace(config, prompt=choose_format(point.model, prompt, point.adapter))
    if gib is not None:
        check_fits(run_setup(point.preset, config, gib), gib)
    if point.unmerged:
        merge_run(point.unmerged)
    checker = None if verifier is None else get_verifier(verifier)
    answered = any(reward.function is None for reward in get_rewards(rewards))
    result = rl_rows(data=data, limit=None, columns=columns, verifier=checker, answered=answered)
    tokenizer, choice = open_tokenizer(point.model, template, point.adapter, config.prompt)
    config = replace(config, template=choice.template)
    corpus = rl_corpus(tokenizer, config.max_prompt_length, source=result)
    show(f"{point}\n{choice}\n{result.origin()}, {len(corpus.rows):,} rows to train on")
    requested = tuple(_own_benchmark(text, columns, group, guess, corpus) for text in benchmarks)
    drawn: dict[str, Any] = dict(
        num_samples=32,
        temperature=config.temperature,
        min_p=config.min_p,
        max_completion_length=config.max_completion_length,
        batch_size=BATCH_SIZES["vllm" if has_gpu() else "transformers"],
    )
    task = Task(
        name=Path(data).stem,
        title=f"{Path(data).name} from {Path(start).name}",
        model=point.model,
        adapter=None if point.adapter is None else str(point.adapter),
        rows=corpus.rows,
        benchmarks=requested,
        rlvr=config,
        sampling=SamplingConfig(**(drawn | dict(sampling or {}))),
        common=settings,
        verifier=corpus.checker,
        rewards=None if rewards is None else tuple(rewards),
        data=corpus.record(data),
        prompt=config.prompt,
        template=config.template,
        smoke=smoke,
    )
    if not smoke:
        return task
    few = replace(task.sampling, num_samples=(sampling or {}).get("num_samples", 8))
    return replace(
        task, sampling=few, benchmarks=tuple(replace(b, rows=b.rows[:8]) for b in requested)
    )


def _own_benchmark(
    text: str, columns: Columns | None, group: str | None, guess: str, corpus: Corpus
) -> Benchmark:
    """A benchmark with the group and the chance of a guess in each row."""
    name, _, file = text.partition("=")
    benchmark = load_benchmark(name, file or None, columns=columns if file else None)
    if file and benchmark.checker is MATH:
        benchmark = replace(benchmark, checker=corpus.checker)
    needed = [group, None if guess == ANSWERS or _is_number(guess) else guess]
    needed = [column for column in needed if column is not None]
    raw: Sequence[Mapping[str, Any]] = benchmark.rows
    if file and needed and not Path(file).is_dir():
        read = [read_raw(part, columns or Columns(), "test")[0] for part in file.split(",")]
        raw = [row for part in read for row in part]
    for column in needed:
        if any(column not in row for row in raw):
            raise ValueError(
                f"{column!r} must be a column of every row of {name}, but it has {sorted(raw[0])}"
            )
    answers = Counter(row.get("answer") for row in corpus.rows)
    rows = []
    for row, own in zip(benchmark.rows, raw, strict=True):
        if guess == ANSWERS:
            chance = answers[row["answer"]] / answers.total()
        else:
            chance = float(guess if _is_number(guess) else own[guess])
        if not 0 <= chance <= 1:
            raise ValueError(
                f"the chance of a guess must be in [0, 1], but {row['id']} has {chance:g}"
            )
        rows.append(row | {"guess": chance} | ({"family": str(own[group])} if group else {}))
    return replace(benchmark, rows=rows)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
