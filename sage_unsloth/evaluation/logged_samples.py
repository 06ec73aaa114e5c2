"""The content of a log of another tool, in one form for all tools."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SampleLog:
    """Samples of one model on one task, sampled and graded by another tool.

    Attributes:
        temperature: of sampling; None if unknown.
        records: `problem_id`, `sample` (from 0), `problem` (the prompt's text), `completion`,
            `num_tokens` and `finish_reason` (None if unknown), `gold`, and `scores` (metric ->
            value of this sample).
        why: why a sample may have no grade of its own, for the message.
        has_texts: whether samples have completions; log-likelihoods have none.
    """

    path: Path
    tool: str
    model: str
    task: str
    temperature: float | None
    records: list[dict[str, Any]]
    why: str
    has_texts: bool = True


def final_answer(target: Any) -> str:
    r"""The answer of a gold that may be a full solution: after `####`, or in `\boxed`; of a list of
    one, its element.
    """
    from sage_unsloth.grading.extraction import extract_answer

    if isinstance(target, list) and len(target) == 1:
        target = target[0]
    text = str(target)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = extract_answer(text, boxed=True) if "\\boxed" in text else None
    return text.strip() if boxed is None else boxed
