"""Training rows with the counts of each filter, and rewards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.figures import table_html, table_text
from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.reward_functions import Reward, get_rewards
from sage_unsloth.grading.total_reward import TotalReward
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.corpora import rl_corpus, rl_rows, sft_corpus, sft_rows
from sage_unsloth.problems.held_out import hold_out
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat, project_template, taught_tokens


@dataclass(frozen=True, repr=False)
class TrainingData:
    """Rows that passed the filters.

    Attributes:
        rows: dicts with `problem`, `answer` and the data's other columns.
        held_out: rows for evaluation; none of `rows` shares a problem with them.
        counts: filter -> number of rows left after it, in order.
        stage: "rl" or "sft".
        prompt: defines the tags of solutions.
        tokenizer: of the model; None if none was given.
    """

    rows: list[dict]
    held_out: list[dict]
    counts: dict[str, int]
    checker: Checker
    stage: str
    prompt: PromptFormat
    tokenizer: Any = None

    @property
    def dataset(self) -> Any:
        """The `datasets.Dataset` for TRL's trainer of the stage.

        Rows for SFT have `prompt` and `completion`, and with a tokenizer also their tokens, which
        the trainer then takes.
        """
        from datasets import Dataset

        from sage_unsloth.training.rlvr_trainer import trainer_row
        from sage_unsloth.training.sft_stage import taught_row

        if self.stage == "sft":
            taught = [taught_row(row, self.prompt) for row in self.rows]
            if self.tokenizer is not None:
                for row, teach in zip(self.rows, taught, strict=True):
                    teach |= taught_tokens(self.tokenizer, row, self.prompt)
            return Dataset.from_list(taught)
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
    """Training rows, with the number left after each filter.

    Args:
        data: "dapo", "openmath", "arithmetic", a file, a hub data set (OWNER/NAME), or
            reasoning-gym:TASK.
        tokenizer: counts tokens; without it there is no filter by length.
        stage: "rl" for problems with an answer, "sft" for worked solutions.
        max_tokens: longest prompt ("rl", default 1,024), or longest prompt and solution together
            ("sft", default 2,048).
        path: a local copy of a known data set, with the hub's columns.
        columns: column names of your own data, such as `{"problem": "question", "answer":
            "total"}`; other columns are passed to rewards.
        answer_pattern: extracts the answer from its column: a regular expression with one group.
        limit: number of rows to read; None reads all, except for dapo, where it is the paper's
            2,000.
        held_out: number of rows to hold out from training, at most a quarter.
        prompt: defines the tags of solutions.
        verifier: grades the answers; None uses the verifier of the data.

    Raises:
        ValueError: a source that cannot be read, a missing column, or no rows left.
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
        from sage_unsloth.training.sft_stage import check_begins

        corpus = sft_rows(**source, limit=limit, prompt=prompt)
        if tokenizer is not None:
            corpus = sft_corpus(tokenizer, max_tokens or 2048, source=corpus, prompt=prompt)
            if tokenizer.chat_template == project_template(prompt):
                check_begins(prompt, corpus.rows)
    else:
        corpus = rl_rows(**source, limit=limit)
        if tokenizer is not None:
            corpus = rl_corpus(tokenizer, max_tokens or 1024, source=corpus)
    rows, selected = hold_out(corpus.rows, min(held_out, len(corpus.rows) // 4))
    counts, grader = corpus.counts, checker or corpus.checker
    return TrainingData(rows, selected, counts, grader, stage, prompt, tokenizer)


def rewards(
    names: Sequence[Reward | str | Callable[..., Any]] = ("answer",),
    *,
    prompt: PromptFormat = PROJECT_PROMPT,
    verifier: Checker | str | Callable[[str, str], Any] = MATH,
    seconds: float = 60.0,
) -> TotalReward:
    """Rewards for a trainer, which takes their `.functions`.

    Args:
        names: "answer" (1 for a correct answer, else 0) and your own functions in TRL's form.
        prompt: defines the tags of an answer.
        verifier: grades the answers.
        seconds: time limit for one call of your own function.
    """
    grader = Grader(checker=get_verifier(verifier), prompt=prompt)
    return TotalReward(get_rewards(names), grader, seconds)
