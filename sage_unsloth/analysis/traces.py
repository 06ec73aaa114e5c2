"""Where a guide acts: scores recorded completions with policy and reference for the guide."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_unsloth.analysis.patterns import Case
from sage_unsloth.analysis.perplexity import load_scorer
from sage_unsloth.analysis.token_page import TokenTrace
from sage_unsloth.models.scoring import score
from sage_unsloth.runs.files import read_json, read_jsonl
from sage_unsloth.sampling.record_sets import completion_ids, prompt_ids
from sage_unsloth.training.stage import COMPLETIONS, read_metrics

if TYPE_CHECKING:
    from sage_unsloth.objective.protocols import Guide
    from sage_unsloth.prompts import Turns


def trace(
    title: str,
    policy: Any,
    tokenizer: Any,
    guide: "Guide",
    problem: "str | Turns",
    record: Mapping[str, Any],
    *,
    reference: Any = None,
    temperature: float = 1.0,
    step: int = 0,
    max_steps: int = 1,
    seed: int = 0,
) -> TokenTrace:
    """Where a guide acts in one recorded completion, token by token.

    A completion that ended by itself includes its EOS, as in training.

    Args:
        policy: π, with its adapter.
        problem: the text of the problem, or a conversation.
        record: of the completion; without `finish_reason` it has `longest`, the length limit.
        reference: π_ref; None is the policy without its adapter.
        step, max_steps: optimizer step, for guides with a schedule.

    Raises:
        ValueError: an empty completion, or no reference.
    """
    import torch
    from peft import PeftModel

    from sage_unsloth.objective.signals import TokenSignals

    ids = completion_ids(tokenizer, record["completion"])
    if "finish_reason" in record:
        ended = record["finish_reason"] == "stop"
    else:  # training logs text alone: what is shorter than the limit has ended by itself
        ended = len(ids) < record["longest"]
    if ended:
        ids.append(tokenizer.eos_token_id)
    prompt = prompt_ids(tokenizer, problem)
    logps, entropies, mask = score(policy, [prompt], [ids], temperature)
    if reference is not None:
        ref_logps, ref_entropies, _ = score(reference, [prompt], [ids], temperature)
    elif isinstance(policy, PeftModel):
        with policy.disable_adapter():
            ref_logps, ref_entropies, _ = score(policy, [prompt], [ids], temperature)
    else:
        raise ValueError(
            "a policy without an adapter needs its reference model. Give reference=model"
        )
    signals = TokenSignals(logps, ref_logps, mask, entropies=entropies, ref_entropies=ref_entropies)
    generator = torch.Generator().manual_seed(seed)
    log_guide = guide.log_guide(signals, step=step, max_steps=max_steps, generator=generator)
    return TokenTrace(
        title=title,
        problem=problem if isinstance(problem, str) else problem[-1]["content"],
        tokens=tuple(tokenizer.decode([token]) for token in ids),
        entropies=tuple(entropies[0].tolist()),
        log_guides=tuple(log_guide[0].tolist()),
        policy_logps=tuple(logps[0].tolist()),
        ref_logps=tuple(ref_logps[0].tolist()),
    )


def read_guide(text: str, own: str = "module:name") -> "Guide":
    """The guide in `run.json`, such as "BranchGuide(ratio=0.3, threshold=1.2)".

    Args:
        text: as recorded.
        own: what the message says where it is the user's own.

    Raises:
        ValueError: not the repr of one of this package's guides.
    """
    from sage_unsloth.methods import adaptive, teacher_guide
    from sage_unsloth.objective import guides, protocols, schedule

    known = (
        guides.BranchGuide,
        guides.TokenGuide,
        guides.RandomGuide,
        schedule.CosineSchedule,
        adaptive.AdaptiveGuide,
        teacher_guide.TeacherGuide,
    )
    classes = {guide.__name__: guide for guide in known}

    def build(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            # `**{...}` has no name, and no guide has a parameter "**".
            words = {word.arg or "**": build(word.value) for word in node.keywords}
            return classes[node.func.id](**words)
        return ast.literal_eval(node)

    try:
        guide = build(ast.parse(text, mode="eval").body)
    except (KeyError, SyntaxError, TypeError, ValueError):
        raise ValueError(
            f"a recorded guide must be one of this package's, got {text!r:.200}. Give your own "
            f"with --guide {own}"
        ) from None
    if not isinstance(guide, protocols.Guide):
        raise ValueError(f"a recorded guide must be a guide, got {text!r:.200}")
    return guide


def own_algorithm(record: Mapping[str, Any]) -> str | None:
    """`module:name` of the user's own algorithm, by the command in a run's record."""
    own = re.search(r"--algorithm[=\s](\S+:\S+)", " ".join(record.get("command", ())))
    return None if own is None else own[1]


def rollout_cases(
    name: str, run: str | Path, count: int
) -> tuple[list[Case], dict[str, str | list[dict[str, str]]]]:
    """Problems of the last step with logged completions, as cases, and their prompts.

    Raises:
        ValueError: the run has no completions.
    """
    rows = read_jsonl(file) if (file := Path(run) / COMPLETIONS).is_file() else []
    if not rows:
        raise ValueError(
            f"the token page needs completions, but {run} has no {COMPLETIONS}, nor a record set. "
            "Evaluate the run, and give that folder as well"
        )
    longest = read_json(Path(run) / "run.json")["settings"]["max_completion_length"]
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    cases, prompts = [], {}
    for prompt, group in groupby(last, key=lambda row: row["prompt"]):
        records = [row | {"sample": place, "longest": longest} for place, row in enumerate(group)]
        correct = [row for row in records if row.get("grade") == "correct"]
        wrong = [row for row in records if row.get("grade") != "correct"]
        problem = f"step {last[0]['step']}, problem {len(cases) + 1}"
        counts = {
            "correct": len(correct),
            "samples": len(records),
            "first correct": next(iter(correct), None),
            "first wrong": next(iter(wrong), None),
        }
        cases.append(Case(problem, None, records[0].get("answer") or "", {name: counts}))
        prompts[problem] = prompt
    return cases[:count], prompts


def run_traces(
    name: str,
    run: str | Path,
    cases: Sequence[Case],
    problems: Mapping[str, Any],
    guide: "Guide | None" = None,
) -> Iterator[tuple[TokenTrace, "Guide"]]:
    """Traces of one run's completions in the case studies.

    For each problem the first correct completion, or else the first wrong one.

    Args:
        name: of the run, as in the cases.
        problems: id -> text, or conversation.
        guide: of the run; None reads it from `run.json`.

    Raises:
        ValueError: no `run.json`, a custom guide, or a problem without text.
    """
    from sage_unsloth.objective.protocols import SteeredGuide

    run = Path(run)
    record = run / "run.json"
    if not record.is_file():
        raise ValueError(f"a training run must have run.json, but {run} has none")
    recorded = read_json(record)
    settings = recorded["settings"]
    if guide is None:
        guide = read_guide(settings["guide"], own_algorithm(recorded) or "module:name")
    if isinstance(guide, SteeredGuide):
        last = read_metrics(run)[-1]
        guide.restore({name: last[f"sage/{name}"] for name in guide.state()})
    policy, reference, tokenizer = _load_run(run, recorded["model_path"])
    for case in cases:
        if case.problem_id not in problems:
            raise ValueError(
                f"scoring needs the text of {case.problem_id!r}. Name the benchmark's file "
                "(--benchmarks NAME=FILE)"
            )
        samples = case.models[name]
        sample = samples["first correct"] or samples["first wrong"]
        grade = sample.get("grade", "not graded")
        title = f"{name}, {case.problem_id}, sample {sample['sample']}, {grade}"
        traced = trace(
            title,
            policy,
            tokenizer,
            guide,
            problems[case.problem_id],
            sample,
            reference=reference,
            temperature=settings["temperature"],
            step=settings["max_steps"] - 1,
            max_steps=settings["max_steps"],
            seed=settings["seed"],
        )
        yield traced, guide


def _load_run(run: Path, start: str) -> tuple[Any, Any, Any]:
    """Policy, reference (None: the policy without its adapter) and tokenizer of a trained run."""
    adapter, whole = run / "adapter", run / "model"
    if adapter.is_dir():
        policy, tokenizer = load_scorer(start, adapter)
        return policy, None, tokenizer
    if whole.is_dir():
        policy, tokenizer = load_scorer(whole)
        return policy, load_scorer(start)[0], tokenizer
    raise ValueError(
        f"a training run must be complete to be scored, but {run} has neither adapter/ nor model/"
    )
