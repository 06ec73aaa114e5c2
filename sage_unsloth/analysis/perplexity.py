"""Scores recorded completions with a model: log-probabilities, entropies, perplexity (Eq. 39).

A plain forward pass of transformers, without Unsloth.

Records hold texts, not tokens, so a text is tokenised again. If a model sampled tokens that the
tokenizer would not choose for the same text, other tokens are scored; their number is compared with
the record's and reported.

Shapes: B completions, T tokens of the longest one, V vocabulary.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.evaluation.bootstrap import mean_difference, mean_interval
from sage_unsloth.models.scoring import LOGITS_AT_ONCE, score
from sage_unsloth.runs.files import append_jsonl, read_json, read_jsonl, write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import refuse_other_settings
from sage_unsloth.sampling.record_sets import completion_ids, prompt_ids

QUANTILES = (0.05, 0.5, 0.95)


def load_scorer(path: str | Path, adapter: str | Path | None = None) -> tuple[Any, Any]:
    """A model and its tokenizer for scoring: in float32 without a GPU, in 16 bits on one.

    Raises:
        ValueError: a missing model, pickled weights, or an adapter for another model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from sage_unsloth.models.device import has_gpu, sixteen_bit_dtype
    from sage_unsloth.models.tokenizers import load_tokenizer
    from sage_unsloth.models.weights import check_adapter_fits, refuse_pickles

    refuse_pickles(path)
    tokenizer = load_tokenizer(path, adapter=adapter)
    dtype = getattr(torch, sixteen_bit_dtype()) if has_gpu() else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
    if adapter is not None:
        from peft import PeftModel

        check_adapter_fits(path, adapter)
        model = PeftModel.from_pretrained(model, str(adapter))
    return model.to("cuda" if has_gpu() else "cpu").eval(), tokenizer


def perplexity(total_logp: float, num_tokens: int) -> float:
    """Eq. 39: PPL_M(y | x) = exp(−(1/|y|) Σ_t log p_M(y_t)).

    Args:
        total_logp: Σ_t log p_M(y_t), nats.
        num_tokens: |y|, tokens without EOS; ValueError if 0.
    """
    if num_tokens < 1:
        raise ValueError(f"perplexity needs at least one token, got {num_tokens}")
    return math.exp(-total_logp / num_tokens)


def score_records(
    model: Any,
    tokenizer: Any,
    records: Sequence[dict],
    problems: Mapping[str, str],
    path: str | Path,
    *,
    settings: Mapping[str, Any],
    batch_size: int = 32,
    bar: Any = None,
) -> list[dict]:
    """Scores what is missing of recorded responses with a baseline, at temperature 1.

    Each batch is on disk before the next one; a second run resumes there.

    Args:
        model, tokenizer: the baseline M.
        problems: id -> text, for the prompt.
        path: .jsonl, one response a line: `problem_id`, `sample`, `num_tokens`, `total_logp` (Σ_t
            log p_M(y_t), nats) and `tokens_as_drawn`, whether the text has as many tokens as were
            sampled. An empty response has 0 tokens.
        settings: must be equal to resume a file, such as the baseline's digest.
        batch_size: at most this many responses in a forward pass; fewer to stay within
            `LOGITS_AT_ONCE`.
        bar: a tqdm bar over responses.

    Returns:
        A row for each record, in their order, as in the file.

    Raises:
        ValueError: a file with other settings; a problem without text.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unknown = [r["problem_id"] for r in records if r["problem_id"] not in problems]
    if unknown:
        raise ValueError(
            f"scoring needs the text of every problem, but {unknown[0]!r} is not among the "
            f"{len(problems)} that were read. Give the benchmark of these records"
        )
    with exclusive_lock(path):
        done = _scores_on_disk(path, settings)
        expected = [(record["problem_id"], record["sample"]) for record in records]
        missing = [r for r, key in zip(records, expected, strict=True) if key not in done]
        if bar is not None:
            bar.update(len(records) - len(missing))
        requested = dict.fromkeys(record["problem_id"] for record in missing)
        prompts = {problem: prompt_ids(tokenizer, problems[problem]) for problem in requested}
        batch_size = min(batch_size, _largest_batch(tokenizer, missing, prompts))
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            new = _score_batch(model, tokenizer, batch, prompts)
            append_jsonl(path, new)
            done |= {(row["problem_id"], row["sample"]): row for row in new}
            if bar is not None:
                bar.update(len(batch))
    return [done[key] for key in expected]


def _scores_on_disk(path: Path, settings: Mapping[str, Any]) -> dict[tuple[str, int], dict]:
    """(problem, sample) -> row of the file, which is created or checked for these settings."""
    beside = path.with_suffix(".baseline.json")
    as_read = json.loads(json.dumps(dict(settings)))
    if beside.exists():
        refuse_other_settings(path, read_json(beside), as_read)
    else:
        write_json(beside, as_read)
    rows = read_jsonl(path) if path.exists() else []
    return {(row["problem_id"], row["sample"]): row for row in rows}


def _largest_batch(
    tokenizer: Any, records: Sequence[dict], prompts: Mapping[str, Sequence[int]]
) -> int:
    """Number of rows of the longest kind within `LOGITS_AT_ONCE`; at least one."""
    lengths = [len(prompt) for prompt in prompts.values()] or [0]
    tokens = max((record["num_tokens"] for record in records), default=0)
    tokens += max(lengths) - min(lengths) + 1
    return max(1, LOGITS_AT_ONCE // (tokens * len(tokenizer)))


def _score_batch(
    model: Any,
    tokenizer: Any,
    batch: Sequence[dict],
    prompts_of: Mapping[str, Sequence[int]],
) -> list[dict]:
    ids = [completion_ids(tokenizer, record["completion"]) for record in batch]
    prompts = [prompts_of[record["problem_id"]] for record in batch]
    present = [number for number, row in enumerate(ids) if row]
    totals = dict.fromkeys(range(len(batch)), 0.0)
    if present:
        logps, _, _ = score(model, [prompts[i] for i in present], [ids[i] for i in present])
        totals |= dict(zip(present, logps.double().sum(-1).tolist(), strict=True))
    return [
        {
            "problem_id": record["problem_id"],
            "sample": record["sample"],
            "num_tokens": len(row),
            "total_logp": totals[number],
            "tokens_as_drawn": len(row) == record["num_tokens"],
        }
        for number, (record, row) in enumerate(zip(batch, ids, strict=True))
    ]


def perplexities(scores: Sequence[dict]) -> dict[str, list[float]]:
    """problem -> the perplexity of each non-empty response."""
    result: dict[str, list[float]] = {}
    for row in scores:
        values = result.setdefault(row["problem_id"], [])
        if row["num_tokens"]:
            values.append(perplexity(row["total_logp"], row["num_tokens"]))
    return {problem: values for problem, values in result.items() if values}


def perplexity_table(
    scores: Mapping[str, Sequence[dict]],
    against: str,
    quantiles: Sequence[float] = QUANTILES,
) -> list[dict[str, Any]]:
    """Quantiles of the responses' perplexity, and the tail compared with `against`.

    For each problem: the quantiles over its responses, and for each other model the share of
    responses above the highest quantile of both models' together, with equally many of each. (A
    quantile of one model alone would be closer to its own responses, so two samples of one model
    would seem to differ.) Then the mean over the problems with responses of every model.

    Returns:
        Rows of `model`, `statistic`, `mean`, `low`, `high`, `difference`, `difference_low`,
        `difference_high` (to `against`, paired by problem; absent for itself), `problems`,
        `responses`, `left_out` (empty ones), `tokens_as_drawn` (share of responses).

    Raises:
        ValueError: `against` is not among the models, or no problem has a response of each.
    """
    if against not in scores:
        raise ValueError(f"against must be one of {', '.join(scores)}, got {against!r}")
    values = {model: perplexities(rows) for model, rows in scores.items()}
    problems = [p for p in values[against] if all(p in result for result in values.values())]
    if not problems:
        raise ValueError("perplexities are compared on common problems, and these models have none")
    statistics = {
        model: {
            f"{q:.0%} quantile": [float(np.quantile(result[p], q)) for p in problems]
            for q in quantiles
        }
        for model, result in values.items()
    }
    baselines = dict.fromkeys(values, statistics[against])
    top = max(quantiles)
    for model, result in values.items():
        if model != against:
            tails = [_tails(result[p], values[against][p], top) for p in problems]
            name = f"share above the {top:.0%} quantile of both"
            statistics[model][name] = [own for own, _ in tails]
            baselines[model] = baselines[model] | {name: [others for _, others in tails]}
    table = []
    for model, result in statistics.items():
        empty = sum(not row["num_tokens"] for row in scores[model])
        counts = {
            "problems": len(problems),
            "responses": len(scores[model]) - empty,
            "left_out": empty,
            "tokens_as_drawn": float(np.mean([row["tokens_as_drawn"] for row in scores[model]])),
        }
        for statistic, per_problem in result.items():
            row = {"model": model, "statistic": statistic} | vars(mean_interval(per_problem))
            if model != against:
                difference = mean_difference(per_problem, baselines[model][statistic])
                row |= {
                    "difference": difference.mean,
                    "difference_low": difference.low,
                    "difference_high": difference.high,
                }
            row = {name: None if value != value else value for name, value in row.items()}  # nan
            table.append(row | counts)
    return table


def _tails(own: Sequence[float], others: Sequence[float], top: float) -> tuple[float, float]:
    """The shares of each side above the `top` quantile of both sides, with equally many of each."""
    count = min(len(own), len(others))
    sides = [np.array(side[:count]) for side in (own, others)]
    limit = np.quantile(np.concatenate(sides), top)
    return float(np.mean(sides[0] > limit)), float(np.mean(sides[1] > limit))
