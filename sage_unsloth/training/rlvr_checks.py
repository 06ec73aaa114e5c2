"""Checks of rows, processes and settings before stage 2 trains."""

from collections.abc import Sequence
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH, normalise
from sage_unsloth.grading.own_reward import try_reward
from sage_unsloth.grading.reward_functions import Reward, check_columns_of
from sage_unsloth.grading.total_reward import UNGRADED
from sage_unsloth.prompts import turns_of
from sage_unsloth.runs.processes import world_size
from sage_unsloth.sampling.record_sets import gold_of, prompt_ids
from sage_unsloth.trainers.backends import TRL, check_backend
from sage_unsloth.training.by_trl import check_trl_config
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_trainer import trainer_row
from sage_unsloth.training.stage import check_tracker


def check_request(config: RlvrConfig) -> None:
    """Raises ValueError for a tracker, backend or number of processes that is not supported."""
    check_tracker(config.report_to)
    check_backend(config.backend)
    check_trl_config(config)
    check_processes(config)


def check_processes(config: RlvrConfig) -> None:
    """Raises ValueError for settings that several processes cannot divide or do not support."""
    processes = world_size()
    if processes == 1:
        return
    # Each process trains on the same number of completions, in whole micro-batches.
    share, rest = divmod(config.completions_per_step, processes)
    if rest or share % (config.micro_batch_size or 1):
        raise ValueError(
            f"the completions of a step ({config.completions_per_step}) must be divisible by the "
            "number of processes, and the share of each by micro_batch_size, got "
            f"WORLD_SIZE={processes} and micro_batch_size={config.micro_batch_size}. Change "
            "prompts_per_step, micro_batch_size or the number of processes"
        )
    if config.credit == "sequence" and share % config.num_generations:
        raise ValueError(
            "credit='sequence' needs whole prompts in each process, so prompts_per_step must be a "
            f"multiple of their number, got {config.prompts_per_step} and WORLD_SIZE={processes}"
        )
    if config.max_resamples or (config.rollouts == "vllm" and config.backend != TRL):
        raise ValueError(
            "several processes need max_resamples=0 and rollouts by transformers, got "
            f"max_resamples={config.max_resamples} and rollouts={config.rollouts!r}. Change these, "
            "or start without torchrun"
        )


def check_fills_a_step(config: RlvrConfig, num_rows: int) -> None:
    """Raises ValueError for fewer rows than a step needs: the trainer would drop every step."""
    if num_rows < config.prompts_per_step:
        raise ValueError(
            f"there must be at least prompts_per_step={config.prompts_per_step} rows, got "
            f"{num_rows}. Give more rows, or prompts_per_step={num_rows}"
        )


def check_rehearsal(config: RlvrConfig, *, graded: bool) -> None:
    """Raises ValueError if a rehearsal cannot work with the other settings.

    It stores correct completions of the start policy, in one process, and scores them without the
    adapter.
    """
    if not config.rehearsal_coef:
        return
    wrong = [
        text
        for text, result in (
            ("rewards without a checked answer", not graded),
            ("reference='base'", config.reference != "sft"),
            ("full_finetuning=True", config.full_finetuning),
            (f"WORLD_SIZE={world_size()}", world_size() > 1),
        )
        if result
    ]
    if wrong:
        raise ValueError(
            "a rehearsal needs answers that are checked, a fresh adapter whose model is π_ref, and "
            f"one process, got {', '.join(wrong)} with rehearsal_coef={config.rehearsal_coef}. "
            "Change that, or set rehearsal_coef=0"
        )


def check_row_golds(rows: Sequence[dict], verifier: Checker = MATH) -> None:
    """Raises ValueError for a gold that cannot be graded, since its row would teach nothing."""
    for number, row in enumerate(rows):
        if verifier is UNGRADED:
            return
        if verifier is not MATH:
            try:
                verifier.check_gold(gold_of(row))
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from None
        elif normalise(row["answer"]) is None:
            raise ValueError(
                f"a gold answer must be text that can be graded, but row {number} has "
                f"{row['answer']!r:.100}"
            )


def check_judges(
    rewards: Sequence[Reward], verifier: Checker, rows: Sequence[dict], seconds: float
) -> None:
    """Checks rewards and verifier on the first row.

    Raises:
        ValueError: a reward lacks a column or returns no number per completion, or a custom
            verifier cannot start a worker.
    """
    row = trainer_row(rows[0])
    check_columns_of(rewards, row)
    for reward in rewards:
        try_reward(reward, row, seconds)
    if verifier is not MATH:
        with Grader(checker=verifier) as grader:
            grader.check_workers()


def check_prompt_lengths(tokenizer: Any, rows: Sequence[dict], limit: int) -> None:
    """Raises ValueError for a prompt over the limit, which would cut what is scored."""
    lengths = [len(prompt_ids(tokenizer, turns_of(row))) for row in rows]
    longer = [number for number, length in enumerate(lengths) if length > limit]
    if longer:
        raise ValueError(
            f"every prompt must fit max_prompt_length={limit} tokens, but {len(longer)} of "
            f"{len(rows)} do not, the first is row {longer[0]} with {lengths[longer[0]]}. Raise "
            "max_prompt_length, or drop these rows"
        )
