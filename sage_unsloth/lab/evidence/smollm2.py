"""The task of a real language model: SmolLM2-135M-Instruct on sums from reasoning-gym.

A problem is a sum or a difference of two numbers of two digits, `47 + 38 = ?`. SFT teaches the
format, and two ways of working:

    direct      23-68=-45                   the usual way
    split       23-60=-37;-37-8=-45         the rare way: tens first, then units

The family is what makes a problem hard for the model: `plus`, `minus` (the result is not negative)
or `negative`. Out of distribution there are `harder` (three numbers, signs mixed) and
`knights_knaves` (two people, logic instead of arithmetic).
"""

import functools
import random
import re

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.checkers import ROLES, roles
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.lab.evidence.smollm2_model import fetch_model, load_extra
from sage_unsloth.prompts import REASONING_END
from sage_unsloth.runs.record import package_version
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig

__all__ = [
    "checker",
    "fetch_model",
    "problems",
    "rlvr_config",
    "route",
    "sampling_config",
    "sft_config",
]

ALGORITHMS = ("grpo", "grpo-reverse-kl", "grpo-no-kl", "sage-branch", "sage-branch-exact")
GYM_VERSION = "0.1.25"  # another one may make other items of a seed
GYM_SEED = 3407
SOURCE = "reasoning-gym"
ROUTES = {"direct": 0.75, "split": 0.25}
RARE_ROUTE = "split"
FAMILIES = ("plus", "minus", "negative", "three", "logic")
# Problems of each split; those of one line are taken, in this order, from one stream without
# repetitions.
SUMS = {"test": 24, "sft": 400, "train": 500}
OUT_OF_DISTRIBUTION = {"harder": 12, "knights_knaves": 8}
SPLITS = (*SUMS, *OUT_OF_DISTRIBUTION)

_EQUATION = re.compile(r"-?\d+[+-](\d+)=-?\d+")


def problems(split: str) -> list[dict]:
    """The rows of `split`: `id`, `problem`, `answer`, `source`, `family`; SFT: `solution`.

    Raises:
        ValueError: `split` is none of `SPLITS`; reasoning-gym is missing, or of another version.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
    if split == "knights_knaves":
        return _knights_and_knaves(OUT_OF_DISTRIBUTION[split])
    if split == "harder":
        return [dict(row) for row in _sums(3, OUT_OF_DISTRIBUTION[split])]
    start = 0
    for name, size in SUMS.items():
        if name == split:
            break
        start += size
    rows = [dict(row) for row in _sums(2, sum(SUMS.values()))[start : start + size]]
    if split == "sft":
        rng = random.Random(GYM_SEED)
        for row in rows:
            way = rng.choices(list(ROUTES), weights=list(ROUTES.values()))[0]
            row["solution"] = working(row["problem"], way)
    return rows


def checker(split: str) -> Checker:
    """What makes an answer to a problem of `split` right."""
    return ROLES if split == "knights_knaves" else MATH


def working(problem: str, way: str) -> str:
    """`problem` from left to right, an equation a number, or by `split` one for tens and units."""
    total, *rest = problem.removesuffix(" = ?").split()
    equations = []
    for sign, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
        unit = number % 10
        parts = [number - unit, unit] if way == "split" and unit else [number]
        for part in parts:
            result = int(total) + (part if sign == "+" else -part)
            equations.append(f"{total}{sign}{part}={result}")
            total = str(result)
    return ";".join(equations)


def route(completion: str) -> str:
    """The way that `completion` takes: a key of `ROUTES`, or `none`.

    The problems have no numbers of one digit, so that whoever adds or subtracts one has split.
    """
    numbers = _EQUATION.findall(completion.split(REASONING_END)[0])
    if not numbers:
        return "none"
    return "split" if any(len(number) == 1 for number in numbers) else "direct"


def sft_config() -> SftConfig:
    """Stage 1: one pass over the rows."""
    return SftConfig(max_steps=50, batch_size=8, learning_rate=5e-4, max_length=128, save_steps=10)


def rlvr_config(seed: int = 3407) -> RlvrConfig:
    """Stage 2 for `get_algorithm(name).configure(rlvr_config(seed))`."""
    return RlvrConfig(
        max_steps=24,
        prompts_per_step=2,
        num_generations=8,
        max_completion_length=48,
        max_prompt_length=96,
        learning_rate=2e-4,
        min_p=0.0,
        preflight_prompts=0,
        save_steps=5,
        sample_steps=10,
        rollouts="transformers",
        seed=seed,
    )


def sampling_config(split: str = "test") -> SamplingConfig:
    """Evaluation: pass@1 to pass@64 on `test`, to pass@8 out of distribution."""
    return SamplingConfig(
        num_samples=64 if split == "test" else 8,
        temperature=1.0,
        min_p=0.0,
        max_completion_length=48 if split == "test" else 80,
        batch_size=64,
    )


@functools.cache
def _sums(terms: int, size: int) -> tuple[dict, ...]:
    """`size` sums of `terms` numbers of two digits each, no two alike."""
    expressions: dict[str, str] = {}
    # A seed of its own for each length, or the longer sums would begin as the shorter ones. Of
    # 16,200 of two numbers, few repeat.
    stream = _gym(
        "chain_sum",
        2 * size,
        GYM_SEED + terms,
        min_terms=terms,
        max_terms=terms,
        min_digits=2,
        max_digits=2,
    )
    for item in stream:
        expressions.setdefault(item["metadata"]["expression"], item["answer"])
    return tuple(
        {
            "id": f"{SOURCE}/sum/{expression.replace(' ', '')}",
            "problem": f"{expression} = ?",
            "answer": answer,
            "source": f"{SOURCE} {GYM_VERSION}",
            "family": _family(expression, int(answer)),
        }
        for expression, answer in list(expressions.items())[:size]
    )


def _family(expression: str, answer: int) -> str:
    if len(expression.split()) > 3:
        return "three"
    if "+" in expression:
        return "plus"
    return "minus" if answer >= 0 else "negative"


def _knights_and_knaves(size: int) -> list[dict]:
    """Items of knights and knaves; reasoning-gym also has heroes and villains, and others."""
    found: dict[str, dict] = {}
    for item in _gym("knights_knaves", 20 * size, GYM_SEED, n_people=2):
        if item["metadata"]["knight_knave_terms"]["knight"] == "knight":
            found.setdefault(item["question"], item)
    rows = [
        {
            "id": f"{SOURCE}/knights_knaves/{item['metadata']['source_index']}",
            "problem": question,
            "answer": item["answer"],
            "source": f"{SOURCE} {GYM_VERSION}",
            "family": "logic",
        }
        for question, item in list(found.items())[:size]
    ]
    for row in rows:
        if roles(row["answer"]) is None:
            raise ValueError(
                f"an answer must state everybody's role; {row['id']} has {row['answer']!r}; "
                "report it"
            )
    return rows


def _gym(task: str, size: int, seed: int, **settings) -> list[dict]:
    """The items of a generator of reasoning-gym, the same ones every time."""
    reasoning_gym = load_extra("reasoning_gym", "reasoning-gym")
    version = package_version("reasoning-gym")
    if version != GYM_VERSION:
        raise ValueError(
            f"the problems are those of reasoning-gym {GYM_VERSION}, because another version may "
            f"make others of the same seed; got {version}; pip install "
            f"reasoning-gym=={GYM_VERSION}"
        )
    return list(reasoning_gym.create_dataset(task, size=size, seed=seed, **settings))
