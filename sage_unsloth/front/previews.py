"""A preview before training: graded completions of the policy, and where a guide would act."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sage_unsloth.figures import table_html, table_text
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.total_reward import TotalReward
from sage_unsloth.problems.held_out import spread
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat, row_messages

if TYPE_CHECKING:
    from sage_unsloth.objective.protocols import Guide

PREVIEW_ARGUMENTS = ("temperature", "top_p", "max_completion_length", "seed")
"""Arguments that a preview takes from the trainer's."""


@dataclass(frozen=True, repr=False)
class Preview:
    """Graded completions of the current model.

    Attributes:
        records: one per completion: `completion`, `grade`, `extracted`, `gold` and so on.
        shares: `solve_rate`, `format_rate`, `dead_groups` and so on (`training.preflight.signal`),
            and the mean of each custom reward.
        entropies: the policy's entropy before each token that the guide was applied to, nats.
        log_guides: log q of each of these tokens.
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
    """Groups of completions, sampled as training will sample them.

    They are stored in `file` and sampled only once.

    Args:
        rows: from `load_dataset`; `num_prompts` of them are used, evenly spaced.
        file: .jsonl file for the completions.
        args: the trainer's arguments, for the sampling settings; None uses the defaults of
            `SamplingConfig`.
        reward: from `rewards`; None checks only the answer.
        guide: shows where this guide would act; needs a policy with an adapter.
        prompt: defines the tags of an answer.
        num_prompts: None uses all rows.
        sampling: fields of `SamplingConfig`, which override `args`.
    """
    from sage_unsloth.sampling.engines import SamplingConfig, TransformersEngine
    from sage_unsloth.sampling.record_sets import sample_and_grade
    from sage_unsloth.training.preflight import add_rewards, signal

    if args is not None:
        of_args = {name: getattr(args, name) for name in PREVIEW_ARGUMENTS}
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
    """Entropies and log q of the tokens of about 24 completions; empty without a guide."""
    from sage_unsloth.analysis.traces import trace

    problems = {row["id"]: row_messages(row) for row in rows}
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
