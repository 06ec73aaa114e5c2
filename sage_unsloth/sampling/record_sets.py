"""Samples and grades the completions of one model on one benchmark, never twice.

Completions are appended to a record set batch by batch; `record_files` describes its file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.grader import Grader, grading_workers
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat, Turns, render_prompt, row_messages
from sage_unsloth.runs.files import append_jsonl
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.stopping import finish_step
from sage_unsloth.sampling.drawing import Drawn, completions, in_rounds
from sage_unsloth.sampling.engine_errors import EngineError
from sage_unsloth.sampling.engines import Engine, SamplingConfig
from sage_unsloth.sampling.grading_records import grade_records, is_stale, regraded_line
from sage_unsloth.sampling.record_files import open_set, set_settings
from sage_unsloth.sampling.token_streams import sample_seed

REGRADED_AT_ONCE = 64

__all__ = [
    "EngineError",
    "prompt_ids",
    "row_gold",
    "sample_and_grade",
    "sample_seed"
]  # fmt: skip


def prompt_ids(tokenizer: Any, problem: str | Turns) -> list[int]:
    """The training prompt, byte for byte, as tokens; the template adds all special tokens.

    Args:
        tokenizer: see `render_prompt`.
        problem: a user's turn, or a whole conversation.
    """
    return tokenizer(render_prompt(tokenizer, problem), add_special_tokens=False)["input_ids"]


def completion_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a recorded completion, without EOS."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_identity(prompt: PromptFormat) -> dict[str, Any]:
    """The prompt format for a set's settings; empty for the project's."""
    return {} if prompt == PROJECT_PROMPT else {"prompt": asdict(prompt)}


def row_gold(row: dict) -> str:
    """The text that the checker compares an answer with."""
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
    token_ids: bool = False,
    bar: Any = None,
) -> list[dict]:
    """Completes N samples of every problem, grades them, and returns the records.

    Args:
        config: sampling; N is its `num_samples`.
        rows: dicts with `id`, `problem` (or `messages`, a conversation), `answer`, and `gold` if
            the checker compares with something else.
        identity: further values that identify the set, such as digests of the weights
            (`model_identity`).
        provenance: origin of the rows; stored with the settings, and may change as long as the
            prompts do not.
        checker: grades; records of another grader or version are graded again first.
        prompt: the prompt format, whose tags mark answers.
        boxed: extract answers by the rules of evaluation, not of training (`extraction`).
        token_ids: record the tokens of each completion too.
        bar: a tqdm bar over completions; None makes one.

    Returns:
        The records of these problems, samples 0 to N - 1, in the order of `rows`.

    Raises:
        ValueError: the file belongs to another set, or another process writes to it; or see
            `Grader.judge_answers`.
        EngineError: the engine failed; run again to resume.
        KeyboardInterrupt, Terminated: Ctrl-C or SIGTERM, after the batch in flight
            (`stopping.finish_step`).
    """
    from sage_unsloth.runs.progress import progress

    path = Path(path)
    num_samples = config.num_samples
    rules = {"boxed": boxed, "checker": checker, "prompt": prompt}
    with (
        exclusive_lock(path),
        Grader(grading_workers(), config.grade_seconds, **rules) as grader,
    ):
        prompts = {row["id"]: prompt_ids(engine.tokenizer, row_messages(row)) for row in rows}
        identity = (
            dict(identity or {}) | ({} if boxed else {"boxed": False}) | prompt_identity(prompt)
        )
        settings = set_settings(config, engine.name, model, benchmark, identity)
        run, records = open_set(path, settings, prompts, provenance, engine.arguments)
        names = {"run": run, "model": model, "benchmark": benchmark}
        _grade_again(path, records, rows, grader)
        done = {(record["problem_id"], record["sample"]) for record in records}
        expected = in_rounds(rows, num_samples)
        missing = [(row, sample) for row, sample in expected if (row["id"], sample) not in done]
        if bar is None:
            bar = progress(
                total=len(expected),
                initial=len(expected) - len(missing),
                desc=f"{model} on {benchmark}",
                unit="completion",
            )
        with finish_step("what is in flight") as stop:
            for drawn in completions(engine, config, missing, prompts, stop, bar, path):
                new = _records(drawn, names)
                if token_ids:
                    for record, (*_, completion) in zip(new, drawn, strict=True):
                        record["token_ids"] = [*completion.token_ids]
                _grade_and_append(path, new, rows, grader)
                records += new
            bar.refresh()
    # `records` is what the file holds; it need not be read again.
    places = {row["id"]: place for place, row in enumerate(rows)}
    results = [
        record
        for record in records
        if record["problem_id"] in places and record["sample"] < num_samples
    ]
    return sorted(results, key=lambda record: (places[record["problem_id"]], record["sample"]))


def _records(drawn: Sequence[Drawn], names: Mapping[str, str]) -> list[dict]:
    """The records of completions, not graded yet."""
    return [
        dict(names)
        | {
            "problem_id": row["id"],
            "sample": sample,
            "seed": seed,
            "completion": completion.text,
            "num_tokens": completion.num_tokens,
            "finish_reason": completion.finish_reason,
            "gold": row_gold(row),
        }
        for row, sample, seed, completion in drawn
    ]


def _grade_and_append(
    path: Path, records: list[dict], rows: Sequence[dict], grader: Grader
) -> None:
    try:
        golds = [record["gold"] for record in records]
        grade_records(records, golds, grader, _problems(records, rows))
    except Exception:
        append_jsonl(path, records)  # what was drawn is kept, and graded when the set is resumed
        raise
    append_jsonl(path, records)


def _problems(records: Sequence[dict], rows: Sequence[dict]) -> list[str]:
    """The text of each record's problem: the last turn of its conversation."""
    texts = {row["id"]: row_messages(row)[-1]["content"] for row in rows}
    return [texts[record["problem_id"]] for record in records]


def _grade_again(path: Path, records: list[dict], rows: Sequence[dict], grader: Grader) -> None:
    """Grades every record of another grader or gold again, on disk and in memory."""
    golds = {row["id"]: row_gold(row) for row in rows}
    stale = [
        record
        for record in records
        if record["problem_id"] in golds and is_stale(record, grader, golds[record["problem_id"]])
    ]
    # In batches as when sampled: the time for answers that hang is that of a batch, and a kill
    # loses no more than one.
    for first in range(0, len(stale), REGRADED_AT_ONCE):
        some = stale[first : first + REGRADED_AT_ONCE]
        expected = [golds[record["problem_id"]] for record in some]
        grade_records(some, expected, grader, _problems(some, rows))
        append_jsonl(path, map(regraded_line, some))
