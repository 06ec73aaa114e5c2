"""Samples completions and grades them, batch by batch on disk, so that a second run samples only what is missing.

One line of `samples.jsonl` is one completion. Its seed belongs to its batch: a batch is a fixed set of (problem, sample)
pairs in a fixed order, so any batch can be drawn again alone.

Shapes: P problems, N samples per problem.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.prompts import render_prompt
from sage_unsloth.records import append_jsonl, read_jsonl, refuse_other_settings, write_json
from sage_unsloth.rewards import Grade, Grader, extract_answer


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How completions are drawn.

    Attributes:
        num_samples: N, completions of each problem.
        temperature, top_p, min_p: sampling.
        max_completion_length: tokens.
        batch_size: completions drawn together.
        grade_seconds: time limit for grading one answer.
        seed: of the first batch; batch i has seed + i.
    """

    num_samples: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    max_completion_length: int = 1024
    batch_size: int = 64
    grade_seconds: float = 5.0
    seed: int = 3407


def sample_and_grade(
    config: SamplingConfig,
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict],
    path: str | Path,
    name: str = "samples",
) -> list[dict]:
    """Draw N completions of every problem, grade them, append them to `path`, and return every record of the file.

    A record: `problem_id`, `sample`, `batch`, `seed`, `completion`, `num_tokens` (without EOS), `finished` (ended by EOS),
    `extracted` (the text in the tag, or null), `grade`.

    Args:
        rows: dicts with `id`, `problem` and `answer`.
        path: a .jsonl file; what it holds is not drawn again. Its settings stand beside it in `.settings.json`.
        name: on the progress bar.

    Raises:
        ValueError: the file was drawn with other settings or for other problems.
    """
    import torch
    from tqdm.auto import tqdm

    path = Path(path)
    settings_path = path.with_suffix(".settings.json")
    settings = asdict(config) | {"problem_ids": [row["id"] for row in rows]}
    if settings_path.exists():
        refuse_other_settings(path, json.loads(settings_path.read_text()), settings)
    else:
        write_json(settings_path, settings)
    pairs = [(row, sample) for row in rows for sample in range(config.num_samples)]
    batches = [pairs[i : i + config.batch_size] for i in range(0, len(pairs), config.batch_size)]
    done = {(r["problem_id"], r["sample"]) for r in read_jsonl(path)} if path.exists() else set()
    bar = tqdm(total=len(pairs), initial=len(done), desc=name, unit="completion")
    model.eval()
    with Grader(time_limit=config.grade_seconds) as grader:
        for number, batch in enumerate(batches):
            # A kill can leave part of a batch; it is drawn again whole, and only what is missing is written.
            if all((row["id"], sample) in done for row, sample in batch):
                continue
            seed = config.seed + number
            torch.manual_seed(seed)
            drawn = _generate(config, model, tokenizer, [row["problem"] for row, _ in batch])
            grades = grader.grade_many(
                [text for text, _, _ in drawn], [row["answer"] for row, _ in batch]
            )
            records = [
                {
                    "problem_id": row["id"],
                    "sample": sample,
                    "batch": number,
                    "seed": seed,
                    "completion": text,
                    "num_tokens": tokens,
                    "finished": finished,
                    "extracted": extract_answer(text),
                    "grade": grade.value,
                }
                for (row, sample), (text, tokens, finished), grade in zip(
                    batch, drawn, grades, strict=True
                )
                if (row["id"], sample) not in done
            ]
            append_jsonl(path, records)
            bar.update(len(records))
    bar.close()
    return read_jsonl(path)


def _generate(
    config: SamplingConfig, model: Any, tokenizer: Any, problems: list[str]
) -> list[tuple[str, int, bool]]:
    """(text, tokens before EOS, whether EOS came) of one completion for each problem."""
    import torch

    prompts = [render_prompt(tokenizer, problem) for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(
        model.device
    )
    with torch.inference_mode():
        ids = model.generate(
            **inputs,
            do_sample=True,
            temperature=config.temperature,
            top_p=config.top_p,
            min_p=config.min_p or None,
            top_k=0,
            max_new_tokens=config.max_completion_length,
            suppress_tokens=[tokenizer.pad_token_id],
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )[:, inputs["input_ids"].shape[1] :]
    result = []
    for row in ids.tolist():
        finished = tokenizer.eos_token_id in row
        row = row[: row.index(tokenizer.eos_token_id)] if finished else row
        result.append((tokenizer.decode(row), len(row), finished))
    return result


def correct_counts(records: Sequence[dict], rows: Sequence[dict], num_samples: int) -> np.ndarray:
    """Correct completions of each problem, (P,), in the order of `rows`.

    Raises:
        ValueError: a problem does not have exactly `num_samples` records.
    """
    found: dict[Any, list[bool]] = defaultdict(list)
    for record in records:
        found[record["problem_id"]].append(record["grade"] == Grade.CORRECT)
    for row in rows:
        if len(found[row["id"]]) != num_samples:
            raise ValueError(
                f"every problem must have {num_samples} samples; {row['id']!r} has {len(found[row['id']])}; "
                "run the same command again to draw the rest"
            )
    return np.array([sum(found[row["id"]]) for row in rows])
