"""Estimates before training how much a guide can change, from the completions of the preflight."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_unsloth.grading.checker import Grade
from sage_unsloth.methods.advantage_rules import GRPO
from sage_unsloth.models.scoring import LOGITS_AT_ONCE, score
from sage_unsloth.prompts import row_messages
from sage_unsloth.runs.files import write_json
from sage_unsloth.sampling.record_sets import completion_ids, prompt_ids
from sage_unsloth.training.policy_engine import preserve_random_state
from sage_unsloth.training.preflight import chosen_rows

if TYPE_CHECKING:
    from sage_unsloth.objective.guide_dose import GuideDose
    from sage_unsloth.objective.protocols import Guide
    from sage_unsloth.training.rlvr_config import RlvrConfig

DOSE_FILE = "guide_dose.json"

logger = logging.getLogger(__name__)


def guide_dose(
    records: Sequence[Mapping[str, Any]],
    guide: "Guide",
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict],
    *,
    temperature: float = 1.0,
    max_steps: int = 1,
    scale_rewards: str = "group",
) -> "GuideDose":
    """The dose of a guide on graded completions of the start model.

    Before the first step policy and reference are one model, so its log-probabilities and entropies
    are those of both. A completion is scored by its text (`sample_and_grade` records no tokens),
    alone, and only its first `LOGITS_AT_ONCE` / V tokens.

    Args:
        records: with `problem_id`, `completion`, `finish_reason` and `grade`; `reward` if the run
            has other rewards than the checked answer.
        guide: any guide that needs no teacher.
        model, tokenizer: of the records; the forward pass must return logits.
        rows: the problems, with the `id` that the records name.
        max_steps: of the run, for guides with a schedule; the dose is that of the first step.
        scale_rewards: as in `RlvrConfig`.

    Raises:
        ValueError: the guide needs a teacher, or every completion is empty.
    """
    import torch

    from sage_unsloth.objective.guide_dose import compute_dose
    from sage_unsloth.objective.signals import TokenSignals

    if "teacher_logps" in guide.needs:
        raise ValueError(f"a dose needs a guide without a teacher, got {type(guide).__name__}")
    prompts = {row["id"]: prompt_ids(tokenizer, row_messages(row)) for row in rows}
    generator = torch.Generator().manual_seed(0)
    # The forward pass returns all logits, T × V of them.
    most = max(1, LOGITS_AT_ONCE // len(tokenizer))
    scored, log_guides = [], []
    for record in records:
        ids = completion_ids(tokenizer, record["completion"])
        # The EOS is not in the text, and the guide acts on it too.
        if record["finish_reason"] == "stop":
            ids.append(tokenizer.eos_token_id)
        if not ids:
            continue
        logps, entropies, mask = score(
            model, [prompts[record["problem_id"]]], [ids[:most]], temperature
        )
        # Policy and reference are one model here, so logps stand for both.
        signals = TokenSignals(logps, logps, mask, entropies=entropies, ref_entropies=entropies)
        log_guide = guide.log_guide(signals, step=0, max_steps=max_steps, generator=generator)
        log_guides.append(log_guide[0])
        scored.append(record)
    if not scored:
        raise ValueError("a dose needs at least one completion that is not empty, got none")
    correct = [record["grade"] == Grade.CORRECT for record in scored]
    pad = torch.nn.utils.rnn.pad_sequence
    return compute_dose(
        pad(log_guides, batch_first=True),
        pad([torch.ones(len(log_guide)) for log_guide in log_guides], batch_first=True),
        correct,
        [float(record.get("reward", c)) for record, c in zip(scored, correct, strict=True)],
        [record["problem_id"] for record in scored],
        scale_rewards,
    )


def report_dose(
    records: Sequence[Mapping[str, Any]],
    config: "RlvrConfig",
    guide: "Guide",
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict],
    folder: Path,
) -> None:
    """Logs the dose on the completions of the preflight, and writes `DOSE_FILE`.

    Skipped for a guide that needs a teacher, which is not among the signals yet, and where policy
    and reference differ from the start (`reference="base"`). Training is not changed by it
    (`policy_engine.preserve_random_state`).

    Args:
        records: of `preflight`.
        model, tokenizer: the policy that the preflight sampled.
        folder: of the run.
    """
    from sage_unsloth.objective.guide_dose import dose_text
    from sage_unsloth.objective.guides import BranchGuide, RandomGuide

    if "teacher_logps" in guide.needs or config.reference == "base":
        return
    with preserve_random_state(model, tokenizer):
        # Dropout off; the context puts the mode back.
        model.eval()
        dose = guide_dose(
            records,
            guide,
            model,
            tokenizer,
            chosen_rows(config, rows),
            temperature=config.temperature,
            max_steps=config.max_steps,
            scale_rewards=config.scale_rewards,
        )
    on_prefix = isinstance(guide, BranchGuide)
    # β σ Σ log q is what a guide pays where rewards are divided by their deviation.
    comparable = config.advantages == GRPO and not isinstance(guide, RandomGuide)
    text = dose_text(dose, config.beta, config.credit, on_prefix=on_prefix, comparable=comparable)
    settings = {"beta": config.beta, "credit": config.credit, "text": text}
    write_json(folder / DOSE_FILE, asdict(dose) | settings)
    logger.info("Preflight: %s", text)
