"""What a notebook calls next to the trainers of TRL and Unsloth: thin functions over the package.

    load_unsloth()
    model, tokenizer = load_policy(MODEL, lora=LoraSettings())
    data = load_dataset("mine.jsonl", tokenizer, max_tokens=512)
    reward = rewards(["answer"])
    args = grpo_config(OUT, tokenizer, max_steps=200)
    print(preview(model, tokenizer, data.rows, OUT / "preview.jsonl", args=args, reward=reward))
    trainer = GRPOTrainer(model, reward.functions, args, data.dataset, processing_class=tokenizer)
    with guided_kl(trainer, BranchGuide()):
        train(trainer, OUT, reward=reward)
    evaluate(["sft=runs/sft", f"mine={OUT}"], ["math500-l5"], OUT / "evaluation")

The commands `sft` and `train` do the same, and also plan, refuse what cannot fit, and record a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sage_unsloth.figures import table_html, table_text
from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.reward_functions import Reward, get_rewards
from sage_unsloth.grading.total_reward import TotalReward
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.corpora import rl_corpus, rl_rows, sft_corpus, sft_rows
from sage_unsloth.problems.held_out import hold_out, spread
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat, turns_of

if TYPE_CHECKING:
    from sage_unsloth.objective.protocols import Guide
    from sage_unsloth.training.card_plan import CardPlan

SAMPLING = ("temperature", "top_p", "max_completion_length", "seed")
"""What a preview takes from a trainer's arguments under the same name."""


@dataclass(frozen=True, repr=False)
class TrainingData:
    """Rows that passed the filters.

    Attributes:
        rows: dicts with `problem`, `answer` and the data's other columns.
        held_out: rows kept from training; none of `rows` has one of their problems.
        counts: filter -> rows left after it, in order.
        checker: what makes an answer correct.
        stage: "rl" or "sft".
        prompt: the tags that solutions are taught with.
    """

    rows: list[dict]
    held_out: list[dict]
    counts: dict[str, int]
    checker: Checker
    stage: str
    prompt: PromptFormat

    @property
    def dataset(self) -> Any:
        """The `datasets.Dataset` that TRL's trainer of the stage takes."""
        from datasets import Dataset

        from sage_unsloth.training.rlvr_trainer import trainer_row
        from sage_unsloth.training.sft_stage import taught_row

        if self.stage == "sft":
            return Dataset.from_list([taught_row(row, self.prompt) for row in self.rows])
        return Dataset.from_list([trainer_row(row) for row in self.rows])

    def __str__(self) -> str:
        return table_text(self._counted()) + f"\n{self._split()}" * bool(self.held_out)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table_html(self._counted()) + self._split() * bool(self.held_out)

    def _counted(self) -> list[dict[str, str]]:
        return [{"filter": name, "rows left": f"{n:,}"} for name, n in self.counts.items()]

    def _split(self) -> str:
        return f"{len(self.rows):,} rows to train on, {len(self.held_out)} held out"


def load_dataset(
    data: str,
    tokenizer: Any = None,
    *,
    stage: str = "rl",
    max_tokens: int | None = None,
    path: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    answer_pattern: str | None = None,
    limit: int | None = None,
    held_out: int = 0,
    prompt: PromptFormat = PROJECT_PROMPT,
    verifier: Checker | str | Callable[[str, str], Any] | None = None,
) -> TrainingData:
    """Rows to train on, with how many each filter left.

    Args:
        data: "dapo" or "openmath", "arithmetic", a file, OWNER/NAME of the hub, or
            reasoning-gym:TASK.
        tokenizer: counts tokens; without it no row is left out for its length.
        stage: "rl" for problems with an answer, "sft" for worked solutions.
        max_tokens: of a prompt ("rl", 1,024 where not given), or of prompt and solution together
            ("sft", 2,048).
        path: a local copy of a known data set, with the hub's columns.
        columns: of a file of your own: `{"problem": "question", "answer": "total"}`; others are
            passed to rewards.
        answer_pattern: takes the answer out of its column: a regular expression with one group.
        limit: rows of the data to read; None reads all, of dapo the paper's 2,000.
        held_out: rows to keep from training, at most a quarter.
        prompt: the tags that solutions are taught with.
        verifier: what makes an answer correct; None takes that of the data.

    Raises:
        ValueError: a source that cannot be read, a missing column, or no row is left.
    """
    if stage not in ("rl", "sft"):
        raise ValueError(f"stage must be 'rl' or 'sft', got {stage!r}")
    checker = None if verifier is None else get_verifier(verifier)
    own = Columns(names=dict(columns or {}), answer_pattern=answer_pattern)
    source: dict[str, Any] = {
        "data": data,
        "path": path,
        "columns": own if own != Columns() else None,
        "verifier": checker,
    }
    if stage == "sft":
        corpus = sft_rows(**source, limit=limit, prompt=prompt)
        if tokenizer is not None:
            corpus = sft_corpus(tokenizer, max_tokens or 2048, source=corpus, prompt=prompt)
    else:
        corpus = rl_rows(**source, limit=limit)
        if tokenizer is not None:
            corpus = rl_corpus(tokenizer, max_tokens or 1024, source=corpus)
    rows, selected = hold_out(corpus.rows, min(held_out, len(corpus.rows) // 4))
    return TrainingData(rows, selected, corpus.counts, checker or corpus.checker, stage, prompt)


def rewards(
    names: Sequence[Reward | str | Callable[..., Any]] = ("answer",),
    *,
    prompt: PromptFormat = PROJECT_PROMPT,
    verifier: Checker | str | Callable[[str, str], Any] = MATH,
    seconds: float = 60.0,
) -> TotalReward:
    """Rewards as a trainer takes them: `.functions` and `.weights`.

    Args:
        names: "answer", 1 for a correct one, and functions of your own in TRL's form.
        prompt: the tags by which an answer is found.
        verifier: what makes an answer correct.
        seconds: time limit of a call of a function of your own.
    """
    grader = Grader(checker=get_verifier(verifier), prompt=prompt)
    return TotalReward(get_rewards(names), grader, seconds)


@dataclass(frozen=True, repr=False)
class Preview:
    """Completions of the model as it is, graded.

    Attributes:
        records: one a completion: `completion`, `grade`, `extracted`, `gold` and so on.
        shares: `solve_rate`, `format_rate`, `dead_groups` and so on (`training.preflight.signal`),
            and the mean of each reward of your own.
        entropies: of the policy before each token that the guide was asked about, nats.
        log_guides: log q that the guide gives each of these tokens.
    """

    records: list[dict]
    shares: dict[str, float]
    entropies: np.ndarray
    log_guides: np.ndarray

    def __str__(self) -> str:
        return table_text(self._row())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table_html(self._row())

    def _row(self) -> list[dict[str, str]]:
        return [{name: f"{share:.2f}" for name, share in self.shares.items()}]


def preview(
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict],
    file: str | Path,
    *,
    args: Any = None,
    reward: TotalReward | None = None,
    guide: "Guide | None" = None,
    prompt: PromptFormat = PROJECT_PROMPT,
    num_prompts: int | None = 16,
    **sampling: Any,
) -> Preview:
    """Look before you train: groups of completions, drawn as training will draw them.

    What is drawn is kept in `file`, and drawn once.

    Args:
        model: the policy.
        tokenizer: of the policy.
        rows: of `load_dataset`; `num_prompts` of them are asked, evenly over the list.
        file: gets the completions, a .jsonl.
        args: of the trainer, whose sampling is taken; None takes `SamplingConfig`'s defaults.
        reward: of `rewards`; None for the checked answer alone.
        guide: where would it act? Needs a policy with an adapter.
        prompt: the tags by which an answer is found.
        num_prompts: None asks all rows.
        sampling: fields of `SamplingConfig`, in place of those of `args`.
    """
    from sage_unsloth.sampling.engines import SamplingConfig, TransformersEngine
    from sage_unsloth.sampling.record_sets import sample_and_grade
    from sage_unsloth.training.preflight import add_rewards, signal

    if args is not None:
        of_args = {name: getattr(args, name) for name in SAMPLING}
        of_args |= {"num_samples": args.num_generations, "min_p": args.min_p or 0.0}
        sampling = of_args | {"batch_size": args.per_device_train_batch_size} | sampling
    count = len(rows) if num_prompts is None else min(num_prompts, len(rows))
    chosen = [{"id": f"look-{i}"} | row for i, row in enumerate(spread(rows, count))]
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    solution = None if reward is None else reward.solution
    records = sample_and_grade(
        SamplingConfig(**sampling),
        TransformersEngine(model, tokenizer),
        chosen,
        file,
        model=file.stem,
        benchmark="preview",
        boxed=False,
        prompt=prompt,
        checker=MATH if solution is None else solution.grader.checker,
    )
    means = {} if reward is None else add_rewards(records, reward, chosen, tokenizer)
    entropies, log_guides = _where_it_acts(model, tokenizer, guide, chosen, records)
    return Preview(records, signal(records) | means, entropies, log_guides)


def _where_it_acts(
    model: Any,
    tokenizer: Any,
    guide: "Guide | None",
    rows: Sequence[dict],
    records: Sequence[dict],
) -> tuple[np.ndarray, np.ndarray]:
    """Entropies and log q of the tokens of about 24 of the completions; empty without a guide."""
    from sage_unsloth.analysis.traces import trace

    problems = {row["id"]: turns_of(row)[-1]["content"] for row in rows}
    traces = [
        trace("", model, tokenizer, guide, problems[record["problem_id"]], record)
        for record in records[:: max(1, len(records) // 24)]
        if record["completion"] and guide is not None
    ]
    empty = [np.zeros(0)]
    return (
        np.concatenate(empty + [np.array(trace.entropies) for trace in traces]),
        np.concatenate(empty + [np.array(trace.log_guides) for trace in traces]),
    )


def grpo_config(
    folder: str | Path,
    tokenizer: Any,
    *,
    rollouts: str = "transformers",
    recompute_logits: bool = False,
    **given: Any,
) -> Any:
    """TRL's `GRPOConfig`, as Unsloth generates it, without the defaults that would quietly train
    something else; `training.grpo_arguments.QUIET_DEFAULTS` lists these, and why.

    Args:
        folder: of the run; checkpoints go to `checkpoints/` in it.
        tokenizer: whose pad token is never drawn.
        rollouts: "transformers" or "vllm".
        recompute_logits: Unsloth's loss computes its logits twice instead of keeping them: less
            memory, the same result. It holds for the process.
        given: any field of `GRPOConfig`, which takes the place of the one set here.
    """
    from sage_unsloth.trainers import switches
    from sage_unsloth.training.grpo_arguments import grpo_arguments

    switches.recompute_logits(recompute_logits)
    return grpo_arguments(Path(folder), tokenizer.pad_token_id, rollouts=rollouts, **given)


@dataclass(frozen=True)
class Recording:
    """What `record_run` found in the folder.

    Attributes:
        checkpoint: the newest complete one, for `trainer.train(resume_from_checkpoint=...)`; None
            at the start.
        finished: nothing is left to train.
    """

    checkpoint: str | None
    finished: bool


@contextmanager
def record_run(
    trainer: Any, folder: str | Path, *, name: str = "GRPO", reward: TotalReward | None = None
) -> Iterator[Recording]:
    """Within this context `trainer.train()` can be stopped: each step's metrics are on disk before
    the next, an interrupt saves first, and `checkpoint` is what training resumes from.

        with guided_kl(trainer, guide), record_run(trainer, folder, reward=reward) as run:
            if not run.finished:
                trainer.train(resume_from_checkpoint=run.checkpoint)

    Args:
        trainer: TRL's or Unsloth's, of either stage; its checkpoints go to `folder/checkpoints`.
        folder: gets `metrics.jsonl`, `completions.jsonl` with rewards, and `adapter/` at the end.
        name: on the progress bar.
        reward: of `rewards`, whose grades are counted at each step.
    """
    from sage_unsloth.patch.choice import is_open
    from sage_unsloth.runs.checkpoints import copy_result, last_checkpoint, trained_adapter
    from sage_unsloth.runs.files import whole_folder
    from sage_unsloth.trainers.finite import finite_only
    from sage_unsloth.training import stage
    from sage_unsloth.training.live import LivePlot
    from sage_unsloth.training.rlvr_trainer import log_grades

    folder = Path(folder)
    resume = last_checkpoint(folder / "checkpoints")
    trained = trained_adapter(folder, resume)
    if trained is None:
        trainer.add_callback(LivePlot())
        extra: dict[str, Any] = {}
        if reward is not None:
            extra["extra"] = log_grades(folder, reward, sample_steps=25)
        # An open `guided_kl` stops at a number that is not finite already.
        guided = reward is not None or is_open(trainer)
        checks = nullcontext() if guided else finite_only(trainer)
        with checks, stage.log_steps(trainer, folder, name, resume=resume, **extra):
            yield Recording(None if resume is None else str(resume), finished=False)
    else:
        yield Recording(None, finished=True)
    if not (folder / "adapter").exists():
        with whole_folder(folder / "adapter") as partial:
            if trained is None:
                trainer.model.save_pretrained(partial)
            else:
                copy_result(trained, partial)


def train(
    trainer: Any,
    folder: str | Path,
    *,
    name: str = "GRPO",
    reward: TotalReward | None = None,
    merge_with: Any = None,
) -> list[dict]:
    """`trainer.train()` inside `record_run`, resumed where it stopped. A finished folder is not
    trained again.

    Args:
        trainer, folder, name, reward: see `record_run`.
        merge_with: the tokenizer, untouched by the trainer: also writes `model/`, the model with
            its adapter merged, for RL to start from.

    Returns:
        The rows of `metrics.jsonl`, one an optimizer step.
    """
    from sage_unsloth.models.merging import save_merged
    from sage_unsloth.training import stage

    folder = Path(folder)
    with record_run(trainer, folder, name=name, reward=reward) as run:
        if not run.finished:
            trainer.train(resume_from_checkpoint=run.checkpoint)
    if merge_with is not None and not (folder / "model").exists():
        save_merged(trainer.model, merge_with, folder / "model")
    return stage.read_metrics(folder)


class Report(dict):
    """A report on models and benchmarks, which prints as tables."""

    def __str__(self) -> str:
        from sage_unsloth.evaluation.report_text import report_text

        return report_text(self)


def evaluate(
    models: Sequence[str],
    benchmarks: Sequence[str],
    folder: str | Path,
    *,
    problems: int | None = None,
    against: str | None = None,
    engine: str = "auto",
    training: Sequence[dict] = (),
    **sampling: Any,
) -> Report:
    """pass@k of models on benchmarks, with intervals and paired differences; what is on disk is not
    drawn again.

    Args:
        models: "NAME=MODEL" or "NAME=MODEL+ADAPTER": a run, a folder, a preset or a hub id each.
        benchmarks: names that `load_benchmark` knows, or "NAME=FILE".
        folder: gets samples, tables and figures.
        problems: of each benchmark only the first so many.
        against: the model that the others are compared with; None takes the first.
        engine: "auto", "transformers" or "vllm".
        training: rows that were trained on, to look for in the benchmarks.
        sampling: fields of `SamplingConfig`, such as `num_samples=64`; the defaults are the
            paper's.
    """
    from sage_unsloth.evaluation import evaluator
    from sage_unsloth.evaluation.named_models import parse_model
    from sage_unsloth.sampling.engines import SamplingConfig

    return Report(
        evaluator.evaluate(
            [parse_model(text) for text in models],
            [evaluator.parse_benchmark(text, problems=problems) for text in benchmarks],
            folder,
            SamplingConfig(**sampling),
            engine=evaluator.choose_engine(engine),
            training=training,
            against=against,
            show=print,
        )
    )


def compare(
    sets: Sequence[str | Path], folder: str | Path, *, against: str | None = None
) -> Report:
    """The report of `evaluate` on samples that are on disk, of other runs, machines or tools.

    Args:
        sets: .jsonl files, folders, or logs of lm-evaluation-harness and inspect_ai.
        folder: gets tables and figures.
        against: see `evaluate`.
    """
    from sage_unsloth.evaluation import report

    return Report(report.compare([str(path) for path in sets], folder, against))


def plan_for_card(*models: str | Path, memory: float | None = None) -> "CardPlan":
    """The settings with which the first of these models fits the card that is there.

    Args:
        models: presets, hub ids, or a `Path` that another notebook may have left; preferred first.
        memory: of the card, GiB; None asks this machine.

    Raises:
        ValueError: no model fits.
    """
    from sage_unsloth.training import card_plan

    return card_plan.plan_for_card(*models, memory=memory)


def ask(
    model: str | Path,
    question: str,
    *,
    n: int = 1,
    temperature: float | None = None,
    max_tokens: int = 512,
    seed: int = 3407,
) -> list[str]:
    """`n` answers of a model to a question, in the prompt format that it was trained with.

    Args:
        model: a run, a folder, a preset or a hub id, or "MODEL+ADAPTER".
        question: a user's turn.
        n: answers; several need a temperature.
        temperature: None answers greedily.
        max_tokens: of an answer.
        seed: of the first answer.

    Raises:
        ValueError: several greedy answers, or an unknown model.
    """
    from sage_unsloth.evaluation import ask as asking
    from sage_unsloth.evaluation.named_models import parse_model

    config = asking.sampling_of(n, temperature, max_tokens)
    spec = parse_model(f"model={model}")
    with asking.open_model(spec, asking.LONGEST_PROMPT + max_tokens) as (engine, _):
        return [completion.text for completion in asking.ask(engine, question, config, seed)]


def save(run: str | Path, to: str, out: str | Path, **options: Any) -> Path:
    """Writes what a run trained for use elsewhere, with a model card, and checks it.

    Args:
        run: folder of an SFT or RL run.
        to: "adapter", "merged" or "gguf".
        out: new folder.
        options: of `export.export`, such as `quantization="q8_0"`.

    Raises:
        ValueError: `out` exists, the run is not complete, or a check failed.
    """
    from sage_unsloth.export import export
    from sage_unsloth.models.trained import read_run

    return export(read_run(run), to, out, **options)
