"""Completions for a rehearsal: sampled from π_ref before the first step, graded and stored."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.methods.rehearsal import RehearsalRule, Stored, rehearsal_rule
from sage_unsloth.problems.held_out import spread
from sage_unsloth.prompts import row_messages
from sage_unsloth.sampling.engines import Engine
from sage_unsloth.sampling.record_sets import completion_ids, prompt_ids, sample_and_grade
from sage_unsloth.training.preflight import sampling_as_in_training
from sage_unsloth.training.rlvr_config import RlvrConfig

REHEARSAL = "rehearsal.jsonl"
"""The record set of all samples, correct or wrong, in a run's folder."""

logger = logging.getLogger(__name__)


def draw_rehearsal(
    config: RlvrConfig,
    engine: Engine,
    rows: Sequence[dict],
    folder: Path,
    verifier: Checker,
    *,
    resumed: bool = False,
) -> list[Stored]:
    """Samples completions of training rows as training does, and returns the correct ones.

    `config.rehearsal` sets the number of problems and samples. A second call with a complete file
    samples nothing.

    Args:
        engine: samples from π_ref, the policy that training begins with.
        folder: of the run, which gets the record set `REHEARSAL`.
        resumed: training has begun, so the engine's policy is no longer π_ref.

    Raises:
        ValueError: no usable correct completion; or the file is gone though training has begun.
    """
    rule, path = rehearsal_rule(config.rehearsal), folder / REHEARSAL
    if resumed and not path.exists():
        raise ValueError(
            f"a run is resumed with its rehearsal completions, but {path} is gone. Put it back, or "
            "choose another folder"
        )
    # Evenly spaced, because rows are often sorted by source or difficulty.
    chosen = spread(rows, min(rule.problems, len(rows)))
    requested = [row | {"id": f"prompt-{number}"} for number, row in enumerate(chosen)]
    sampling = sampling_as_in_training(config, engine, rule.samples)
    records = sample_and_grade(
        sampling,
        engine,
        requested,
        path,
        model="policy",
        benchmark="rehearsal",
        boxed=False,
        checker=verifier,
        prompt=config.prompt,
        token_ids=True,
    )
    stored = _right(records, requested, engine, rule)
    problems = len({item.problem for item in stored})
    if not stored:
        raise ValueError(
            f"a rehearsal needs correct completions of the start model, but none of {len(records)} "
            f"on {len(requested)} problems could be used. Raise its samples "
            f"(rehearsal={rule.divergence},samples={2 * rule.samples}), lower solved, or use "
            "easier problems or more SFT"
        )
    logger.info(
        "Rehearsal: %d correct completions of %d of %d problems are stored.",
        len(stored),
        problems,
        len(requested),
    )
    return stored


def _right(
    records: Sequence[dict], rows: Sequence[dict], engine: Engine, rule: RehearsalRule
) -> list[Stored]:
    """The correct records with the sampled tokens and their EOS.

    A file without recorded tokens gets those of the text, if there are equally many.
    """
    tokenizer = engine.tokenizer
    right = Counter(r["problem_id"] for r in records if r["grade"] == Grade.CORRECT)
    places = {row["id"]: number for number, row in enumerate(rows)}
    prompts = {name: prompt_ids(tokenizer, row_messages(rows[places[name]])) for name in right}
    results = []
    for record in records:
        name = record["problem_id"]
        # A truncated completion would teach not to stop.
        if record["grade"] != Grade.CORRECT or record["finish_reason"] != "stop":
            continue
        if not rule.stores(right[name]):
            continue
        ids = record.get("token_ids")
        if ids is None:
            ids = completion_ids(tokenizer, record["completion"])
        # Text can be tokenised in another way than it was sampled; such records are dropped.
        if ids and len(ids) == record["num_tokens"]:
            results.append(Stored(places[name], prompts[name], [*ids, tokenizer.eos_token_id]))
    return results
