"""Draws and grades the completions of one model on one benchmark, so that nothing is drawn twice.

What is drawn goes to a record set, batch by batch; `record_files` describes its file.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.grader import Grader, grading_workers
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat, Turns, render_prompt, turns_of
from sage_unsloth.runs.files import append_jsonl
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.stopping import finishing
from sage_unsloth.sampling.engines import Engine, SamplingConfig
from sage_unsloth.sampling.grading_records import grade_records, is_stale, regraded_line
from sage_unsloth.sampling.record_files import open_set, set_settings


class EngineError(RuntimeError):
    """The engine failed while drawing; what was drawn before is on disk."""


def sample_seed(seed: int, problem_id: str, sample: int) -> int:
    """The seed of one completion: 52 bits of the SHA-256 of `[seed, problem_id, sample]` as JSON.

    It depends on nothing else, so any completion can be drawn again alone, and two models answer a
    problem from the same stream. 52 bits survive any reader of JSON; among a million completions,
    two share a seed with a chance of 1e-4.
    """
    text = json.dumps([seed, problem_id, sample])
    return int(hashlib.sha256(text.encode()).hexdigest()[:13], 16)


def prompt_ids(tokenizer: Any, problem: str | Turns) -> list[int]:
    """The training prompt, byte for byte, as tokens; the template brings all special tokens.

    Args:
        tokenizer: see `render_prompt`.
        problem: a user's turn, or a whole conversation.
    """
    return tokenizer(render_prompt(tokenizer, problem), add_special_tokens=False)["input_ids"]


def asked_in(prompt: PromptFormat) -> dict[str, Any]:
    """The format as the settings of a set have it; the project's is not named in them."""
    return {} if prompt == PROJECT_PROMPT else {"prompt": asdict(prompt)}


def gold_of(row: dict) -> str:
    """What the checker compares an answer with."""
    return row["gold"] if "gold" in row else row["answer"]


def sample_and_grade(
    config: SamplingConfig,
    engine: Engine,
    rows: Sequence[dict],
    path: str | Path,
    *,
    model: str,
    benchmark: str,
    identity: Mapping[str, Any] | None = None,
    provenance: Sequence[dict] = (),
    checker: Checker = MATH,
    boxed: bool = True,
    prompt: PromptFormat = PROJECT_PROMPT,
    bar: Any = None,
) -> list[dict]:
    """Draw what is missing of N completions of every problem, grade it, and return the records.

    Args:
        config: sampling; N is its `num_samples`.
        engine: of the model; see `engines`.
        rows: dicts with `id`, `problem` (or `messages`, a conversation), `answer`, and `gold`
            where the checker compares with something else.
        path: the record set.
        model, benchmark: names for the records.
        identity: what else tells this set from others, such as digests of the weights
            (`model_identity`).
        provenance: where the rows are from; kept beside the settings, and free to change as long as
            the prompts do not.
        checker: grades; records of another grader or version are graded again first.
        prompt: the format that the engine's model is asked in, whose tags mark its answers.
        boxed: take answers by the rules of evaluation; else by those of training (`extraction`).
        bar: a tqdm bar over completions to advance; None makes one.

    Returns:
        The records of these problems, samples 0 to N - 1, in the order in which they were drawn.

    Raises:
        ValueError: the file belongs to another set, or another process writes to it; or see
            `Grader.judge_answers`.
        EngineError: the engine failed; a second run resumes from there.
        KeyboardInterrupt, Terminated: Ctrl-C or SIGTERM, after the batch in flight
            (`stopping.finishing`).
    """
    from sage_unsloth.runs.progress import progress

    path = Path(path)
    num_samples = config.num_samples
    rules = {"boxed": boxed, "checker": checker, "prompt": prompt}
    with (
        locked(path),
        Grader(grading_workers(), config.grade_seconds, **rules) as grader,
    ):
        prompts = {row["id"]: prompt_ids(engine.tokenizer, turns_of(row)) for row in rows}
        identity = dict(identity or {}) | ({} if boxed else {"boxed": False}) | asked_in(prompt)
        settings = set_settings(config, engine.name, model, benchmark, identity)
        run, records = open_set(path, settings, prompts, provenance)
        names = {"run": run, "model": model, "benchmark": benchmark}
        _grade_again(path, records, rows, grader)
        done = {(record["problem_id"], record["sample"]) for record in records}
        wanted = [(row, sample) for row in rows for sample in range(num_samples)]
        missing = [(row, sample) for row, sample in wanted if (row["id"], sample) not in done]
        if bar is None:
            bar = progress(
                total=len(wanted),
                initial=len(wanted) - len(missing),
                desc=f"{model} on {benchmark}",
                unit="completion",
            )
        tokens, started = 0, time.perf_counter()
        with finishing("the batch in flight") as stop:
            for start in range(0, len(missing), config.batch_size):
                if stop.asked is not None:
                    break
                batch = missing[start : start + config.batch_size]
                new = _draw(engine, config, batch, prompts, names, path)
                _grade_and_append(path, new, grader)
                records += new
                tokens += sum(record["num_tokens"] for record in new)
                pace = tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{pace:.0f} tokens/s", refresh=False)
                bar.update(len(batch))
            bar.refresh()
    # `records` is what the file holds, in its order; it need not be read again.
    return [
        record
        for record in records
        if record["problem_id"] in prompts and record["sample"] < num_samples
    ]


def _draw(
    engine: Engine,
    config: SamplingConfig,
    batch: Sequence[tuple[dict, int]],
    prompts: Mapping[str, Sequence[int]],
    names: Mapping[str, str],
    path: Path,
) -> list[dict]:
    """The records of a batch of (row, sample), not graded yet."""
    seeds = [sample_seed(config.seed, row["id"], sample) for row, sample in batch]
    try:
        drawn = engine.draw([prompts[row["id"]] for row, _ in batch], seeds, config)
    except Exception as error:
        # Engines fail by classes of their own (vLLM's EngineDeadError, CUDA's out of memory).
        raise EngineError(
            f"the engine must draw {len(batch)} completions of {names['model']} on "
            f"{names['benchmark']}; it failed: {type(error).__name__}: {error!s:.500}; what was "
            f"drawn before is kept in {path}; run the same command again, with a smaller batch if "
            "memory ran out"
        ) from error
    return [
        dict(names)
        | {
            "problem_id": row["id"],
            "sample": sample,
            "seed": seed,
            "completion": completion.text,
            "num_tokens": completion.num_tokens,
            "finish_reason": completion.finish_reason,
            "gold": gold_of(row),
        }
        for (row, sample), seed, completion in zip(batch, seeds, drawn, strict=True)
    ]


def _grade_and_append(path: Path, records: list[dict], grader: Grader) -> None:
    try:
        grade_records(records, [record["gold"] for record in records], grader)
    except Exception:
        append_jsonl(path, records)  # what was drawn is kept, and graded when the set is resumed
        raise
    append_jsonl(path, records)


def _grade_again(path: Path, records: list[dict], rows: Sequence[dict], grader: Grader) -> None:
    """Grades every record whose grader or gold is not today's, on disk and in memory."""
    golds = {row["id"]: gold_of(row) for row in rows}
    stale = [
        record
        for record in records
        if record["problem_id"] in golds and is_stale(record, grader, golds[record["problem_id"]])
    ]
    if stale:
        grade_records(stale, [golds[record["problem_id"]] for record in stale], grader)
        append_jsonl(path, map(regraded_line, stale))
