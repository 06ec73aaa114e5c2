"""What RL can learn from: a few groups of completions, sampled as in training, before it starts."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sage_unsloth.grading.checker import Checker, Grade
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.total_reward import UNGRADED, TotalReward
from sage_unsloth.methods.advantage_rules import GRPO, advantage_rule
from sage_unsloth.problems.held_out import spread
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat
from sage_unsloth.runs.files import write_json
from sage_unsloth.sampling.engines import Engine, SamplingConfig
from sage_unsloth.sampling.kinds import count_kinds, kinds_text
from sage_unsloth.sampling.record_sets import completion_ids, sample_and_grade
from sage_unsloth.training.rlvr_trainer import trainer_row
from sage_unsloth.training.rollout_engine import rollout_sampling

PREFLIGHT_FILE = "preflight.json"
PREFLIGHT_SAMPLES = "preflight.jsonl"
VLLM_BATCH = 4096
OF_ANSWERS = ("solve_rate", "format_rate", "parsed_rate")  # where answers are checked
SHARES = ("solve_rate", "format_rate", "parsed_rate", "truncation_rate", "dead_groups")

logger = logging.getLogger(__name__)


def signal(records: Sequence[dict], advantages: str = GRPO) -> dict[str, float]:
    """Shares that say whether a group-relative advantage has anything to work with.

    Args:
        records: with `problem_id`, `grade`, `extracted`, `finish_reason` and `num_tokens`, and
            `reward` unless it is whether the grade is correct; equally many of each problem.
        advantages: the rule, see `methods.advantage_rules`.

    Returns:
        Shares of completions: `solve_rate`, `format_rate` (a complete solution tag), `parsed_rate`
            (a readable answer), `truncation_rate` (no EOS); `dead_groups`, the share of problems
            whose completions all have advantage 0 (under "grpo": equal rewards); `mean_tokens`.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("a preflight needs at least one completion, got none")
    groups: dict[Any, list[float]] = {}
    for record in records:
        reward = float(record.get("reward", record["grade"] == Grade.CORRECT))
        groups.setdefault(record["problem_id"], []).append(reward)
    # The rule decides: w-reinforce learns even from groups with equal rewards.
    taught = advantage_rule(advantages).teaches(torch.tensor(list(groups.values())))
    n = len(records)
    return {
        "solve_rate": sum(record["grade"] == Grade.CORRECT for record in records) / n,
        "format_rate": sum(record["extracted"] is not None for record in records) / n,
        "parsed_rate": sum(record["grade"] in (Grade.CORRECT, Grade.WRONG) for record in records)
        / n,
        "truncation_rate": sum(record["finish_reason"] != "stop" for record in records) / n,
        "dead_groups": (~taught).float().mean().item(),
        "mean_tokens": sum(record["num_tokens"] for record in records) / n,
    }


def answers_remedy(prompt: PromptFormat) -> str:
    """What to do if completions lack the tags or the box of an answer."""
    if prompt.solution is None:
        return "run SFT first, or longer: it teaches the model to put the answer in \\boxed{}"
    return (
        f"run SFT first, or longer: it teaches the tags {' '.join(prompt.solution)}. Or use tags "
        "that the model already writes, such as \\boxed{} (--tags boxed)"
    )


def boxed_share(records: Sequence[dict]) -> float:
    """The share of completions with an answer in a box instead of the requested place."""
    missed = [record for record in records if record["extracted"] is None]
    box = PromptFormat(solution=None)
    boxed = sum(extract_answer(r["completion"], boxed=True, prompt=box) is not None for r in missed)
    return boxed / len(records)


def suggest_fixes(
    values: dict[str, float],
    max_completion_length: int,
    prompt: PromptFormat = PROJECT_PROMPT,
    boxed: float = 0.0,
) -> list[str]:
    """What to change if the signal is small; empty otherwise.

    Args:
        values: see `signal`.
        max_completion_length: tokens.
        boxed: see `boxed_share`.
    """
    result = []
    if values["truncation_rate"] > 0.5:
        result.append(
            f"{values['truncation_rate']:.0%} of the completions were truncated at "
            f"{max_completion_length} tokens, which counts as wrong: raise max_completion_length, "
            "or train on shorter problems"
        )
    if values.get("format_rate", 1) < 0.5:
        place = r"one answer in \boxed{}" if prompt.solution is None else "a complete solution tag"
        seen = f" ({boxed:.0%} put their answer into a box instead)" if boxed else ""
        result.append(
            f"only {values['format_rate']:.0%} of the completions have {place}{seen}, and the "
            f"others are never rewarded: {answers_remedy(prompt)}"
        )
    if values["dead_groups"] > 0.8:
        # Groups without a signal are all correct or all wrong; the solve rate says which.
        often = values.get("solve_rate", 0) >= 0.5
        direction = "harder problems" if often else "easier problems or more SFT"
        result.append(
            f"{values['dead_groups']:.0%} of the groups are dead (all advantages are 0): use "
            f"{direction}, or raise num_generations"
        )
    return result


def check_signal(result: dict[str, float], config: Any, *, force: bool = False) -> None:
    """Stops a run before its first step if every group of the preflight has zero advantages.

    Only the KL term would then move the model.

    Args:
        result: of `preflight`.
        force: only log it.

    Raises:
        ValueError: every group has zero advantages, and `force` is not set.
    """
    if result["dead_groups"] < 1:
        return
    rule = "equal rewards"
    if config.advantages != GRPO:
        rule = f"rewards of which advantages={config.advantages!r} makes 0"
    fact = (
        "a run learns from groups with different advantages, but every preflight group of "
        f"{config.num_generations} got {rule}"
    )
    if "solve_rate" in result:
        fact += f" ({result['solve_rate']:.0%} of the completions are correct)"
    if force:
        logger.warning("%s. Training continues anyway.", fact)
        return
    texts = suggest_fixes(result, config.max_completion_length, config.prompt)
    advice = " ".join(f"{text[0].upper()}{text[1:]}." for text in texts)
    raise ValueError(
        f"{fact}. {advice} Look at more prompts "
        f"(preflight_prompts={2 * config.preflight_prompts}), or train anyway with --force "
        "(force=True)"
    )


def preflight(
    config: Any,
    engine: Engine,
    rows: Sequence[dict],
    folder: Path,
    verifier: Checker = MATH,
    reward: TotalReward | None = None,
) -> tuple[dict[str, float], list[dict]]:
    """Samples a group for each of `config.preflight_prompts` rows, and warns if the signal is
    small.

    Writes `preflight.jsonl` (the completions) and `preflight.json`, which also has the `kinds` of
    comparison (`sampling.kinds`). Training is not changed: the trainer seeds its own streams
    afterwards.

    Args:
        engine: samples from the policy that training begins with.
        rows: the training rows; the prompts are evenly spaced among them.
        reward: its total decides which groups have a signal; None for only the checked answer.

    Returns:
        See `signal`; and the graded completions, with `reward` if the run has rewards of its own.
    """
    chosen = chosen_rows(config, rows)
    # A record needs a gold, also where nothing compares with it.
    unchecked = {"gold": ""} if verifier is UNGRADED else {}
    sampling = sampling_as_in_training(config, engine, config.num_generations)
    path = folder / PREFLIGHT_SAMPLES
    records = sample_and_grade(
        sampling,
        engine,
        [row | unchecked for row in chosen],
        path,
        model="policy",
        benchmark="preflight",
        boxed=False,
        checker=verifier,
        prompt=config.prompt,
    )
    means = {} if reward is None else add_rewards(records, reward, chosen, engine.tokenizer)
    result = signal(records, config.advantages)
    if verifier is UNGRADED:
        result = {name: value for name, value in result.items() if name not in OF_ANSWERS}
    boxed = boxed_share(records) if "format_rate" in result else 0.0
    warnings = suggest_fixes(result, config.max_completion_length, config.prompt, boxed)
    # Only a division by the group's deviation makes small rewards as strong as the answer's.
    if means and verifier is not UNGRADED and config.scale_rewards == "group":
        warnings += _reward_warning(untold_groups(records))
    kinds = count_kinds(records)
    report = result | {"prompts": len(chosen), "warnings": warnings, "kinds": kinds}
    write_json(folder / PREFLIGHT_FILE, report | ({"rewards": means} if means else {}))
    names = {"solved": "solve_rate", "in format": "format_rate", "truncated": "truncation_rate"}
    names |= {"dead groups": "dead_groups"}
    shares = [f"{text} {100 * result[n]:.0f} %" for text, n in names.items() if n in result]
    logger.info(
        "Preflight, %d prompts x %d: %s, %.0f tokens.",
        len(chosen),
        config.num_generations,
        ", ".join(shares),
        result["mean_tokens"],
    )
    if means:
        given = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items())
        logger.info("Preflight, means of your own rewards: %s.", given)
    logger.info("Preflight, how answers reached their grade: %s.", kinds_text(kinds))
    for warning in warnings:
        logger.warning("Preflight: %s.", warning)
    return result, records


def chosen_rows(config: Any, rows: Sequence[dict]) -> list[dict]:
    """The rows that a preflight samples; their ids are their places among all rows.

    So a second preflight of more prompts adds to the first one's completions.
    """
    count = min(config.preflight_prompts, len(rows))
    places = spread(range(len(rows)), count)
    return [rows[place] | {"id": f"row-{place}"} for place in places]


def sampling_as_in_training(config: Any, engine: Engine, num_samples: int) -> SamplingConfig:
    """The sampling of an RL run's rollouts, for completions before it begins."""
    # transformers samples a step's completions together, as in training; vLLM queues by itself
    batch = VLLM_BATCH if engine.name == "vllm" else config.completions_per_step
    return rollout_sampling(config, num_samples, batch)


def untold_groups(records: Sequence[dict]) -> float:
    """The share of groups whose answers are all correct or all wrong but rewarded differently."""
    groups: dict[Any, list[dict]] = {}
    for record in records:
        groups.setdefault(record["problem_id"], []).append(record)
    untold = [
        len({record["grade"] == Grade.CORRECT for record in group}) == 1
        and len({record["reward"] for record in group}) > 1
        for group in groups.values()
    ]
    return sum(untold) / len(untold)


def _reward_warning(untold: float) -> list[str]:
    """A warning if only custom rewards rank the completions of most groups."""
    if untold <= 0.5:
        return []
    return [
        f"in {untold:.0%} of the groups the answers are all correct or all wrong, so only your "
        "other rewards rank the completions, and dividing by the group's standard deviation makes "
        "them as strong as correct answers. Give them only for correct answers, use problems that "
        "are sometimes solved, or set scale_rewards=none"
    ]


def add_rewards(
    records: Sequence[dict], reward: TotalReward, rows: Sequence[dict], tokenizer: Any
) -> dict[str, float]:
    """Adds the total `reward` to each graded record, if a run has custom rewards.

    Args:
        records: of `sample_and_grade`.
        rows: with the `id` that the records name.

    Returns:
        name -> mean of each custom reward; {} for only the checked answer.
    """
    if reward.weights is None:
        return {}
    from transformers import TrainerState

    of_id = {row["id"]: trainer_row(row) for row in rows}
    requested = [of_id[record["problem_id"]] for record in records]
    columns = {name: [row[name] for row in requested] for name in requested[0] if name != "prompt"}
    columns |= {
        "completion_ids": [completion_ids(tokenizer, record["completion"]) for record in records],
        # TRL passes these to reward functions, so one that reads them must work here too.
        "trainer_state": TrainerState(),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    totals = reward.of_records([row["prompt"] for row in requested], records, columns)
    for record, total in zip(records, totals, strict=True):
        record["reward"] = total
    means = {}
    for item, function in zip(reward.rewards, reward.functions, strict=True):
        if item.function is not None:
            given = [row["reward"] for row in function.last_batch if row["reward"] is not None]
            means[item.name] = sum(given) / max(1, len(given))
    return means
