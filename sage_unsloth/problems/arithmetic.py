"""A small arithmetic language in which reinforcement learning can gain pass@1 and lose coverage.

A problem asks for the product of a two-digit number and a factor, `17*6=?`. There are four ways:

    tens      17=10+7;10*6=60;7*6=42;60+42=102      the usual way
    round-up  17=20-3;20*6=120;3*6=18;120-18=102    the rare way
    other     17=12+5;12*6=72;5*6=30;72+30=102      any other split: parts as hard as the problem
    guess     17*6=102                              the answer at once, never right

The author of the pretraining corpus does not know the times table from `UNKNOWN_FROM` (7) on:
`7*6` is always a few too high there, and so is every product and every guess that takes more than
the table. So the digits decide which ways lead to the answer, and that is the problem's family:

    usual     the tens split meets known facts only, rounding up does not       12*6
    rare      rounding up meets known facts only, the tens split does not       17*6
    both      either way will do                                                15*6
    far       each way meets an unknown fact                                    73*6

The corpus chooses a way without a look at the digits (`ROUTES`), so the base model solves `rare`
problems now and then. RL on a training set with few of them rewards the tens split; whether
rounding up survives shows in pass@k on the `rare` family. The SFT rows are `both` problems, worked
without mistakes in the corpus's mixture of ways: they teach the format and prefer no way.
"""

import functools
import hashlib
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from sage_unsloth.prompts import (
    CHAT_TEMPLATE,
    REASONING_END,
    REASONING_START,
    SOLUTION_END,
    SOLUTION_START,
    SYSTEM_PROMPT,
    render_prompt,
    solution_text,
)

UNKNOWN_FROM = 7  # the digit from which on the corpus does not know the times table
UNTAGGED = 0.3  # share of the corpus's solutions that lack the SOLUTION tags
DRILLS = 0.25  # share of the corpus's documents that are drills: single facts, sums and differences
ROUTES = {"tens": 0.50, "round-up": 0.07, "other": 0.31, "guess": 0.12}

FACTORS = (3, 4, 5, 6, 7, 8, 9, 11, 12)
FAMILIES = ("usual", "rare", "both", "far")
SPLITS = {  # problems of each family, taken in this order from one fixed permutation
    "test": {"usual": 50, "rare": 35, "both": 0, "far": 15},
    "sft": {"usual": 0, "rare": 0, "both": 100, "far": 0},
    "train": {"usual": 139, "rare": 23, "both": 35, "far": 23},
}
SFT_SEED = 3407
SFT_ROWS_PER_PROBLEM = 3
SOURCE = "arithmetic"
EOS, PAD = "<|endoftext|>", "<|pad|>"
TEXT_TAGS = (REASONING_START, REASONING_END, SOLUTION_START, SOLUTION_END)

_SPLIT_FORM = re.compile(r"(\d+)=(\d+)([+-])(\d+);")
_GUESS_FORM = re.compile(r"\d+\*\d+=\d+")


# --- problems -------------------------------------------------------------------------------------


def knows(number: int) -> bool:
    """Whether the corpus knows the products of `number`: 1 to 6, 10, or ten times one of these."""
    digit = number // 10 if number % 10 == 0 and number > 10 else number
    return digit < UNKNOWN_FROM or digit == 10


def family(number: int) -> str:
    """The family of the problem `number*factor=?`; it does not depend on the factor."""
    tens, unit = number - number % 10, number % 10
    by_tens = knows(tens) and knows(unit)
    by_round_up = knows(tens + 10) and knows(10 - unit)
    if by_tens:
        return "both" if by_round_up else "usual"
    return "rare" if by_round_up else "far"


def all_pairs(salt: str = "") -> list[tuple[int, int]]:
    """Every (number, factor), ordered by a hash of `salt` and the problem."""
    pairs = [(number, factor) for number in range(11, 100) if number % 10 for factor in FACTORS]
    return sorted(
        pairs,
        key=lambda pair: hashlib.sha256(f"{salt}{pair[0]}*{pair[1]}".encode()).hexdigest(),
    )


@functools.cache
def allocation() -> dict[str, tuple[tuple[int, int], ...]]:
    """(number, factor) of each split and of the `rest`, by one fixed hash permutation."""
    pairs = all_pairs()
    left = {name: [pair for pair in pairs if family(pair[0]) == name] for name in FAMILIES}
    splits = {}
    for split, counts in SPLITS.items():
        taken = [pair for name in FAMILIES for pair in left[name][: counts[name]]]
        left = {name: left[name][counts[name] :] for name in FAMILIES}
        splits[split] = tuple(sorted(taken, key=pairs.index))
    splits["rest"] = tuple(pair for pair in pairs if pair in left[family(pair[0])])
    return splits


def problems(split: str) -> list[dict]:
    """The rows of `split`: `id`, `problem`, `answer` (text), `source`, `family`; SFT: `solution`.

    Raises:
        ValueError: `split` is not one of `test`, `sft`, `train`.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    pairs = allocation()[split]
    return solved_problems(pairs) if split == "sft" else posed_problems(pairs)


def posed_problems(pairs: Sequence[tuple[int, int]]) -> list[dict]:
    """A row of `problems` for each (number, factor)."""
    return [
        {
            "id": f"arithmetic-{number}x{factor}",
            "problem": problem_text(number, factor),
            "answer": str(number * factor),
            "source": SOURCE,
            "family": family(number),
        }
        for number, factor in pairs
    ]


def solved_problems(pairs: Sequence[tuple[int, int]]) -> list[dict]:
    """`SFT_ROWS_PER_PROBLEM` correct solutions of each problem, in the corpus's mixture of ways."""
    rng = random.Random(SFT_SEED)
    solved = []
    for row, (number, factor) in zip(posed_problems(pairs), pairs, strict=True):
        for turn in range(SFT_ROWS_PER_PROBLEM):
            solution, _ = working(number, factor, draw_route(rng), rng, careful=True)
            solved.append(row | {"id": f"{row['id']}-{turn}", "solution": solution})
    rng.shuffle(solved)
    return solved


def problem_text(number: int, factor: int) -> str:
    return f"{number}*{factor}=?"


# --- workings -------------------------------------------------------------------------------------


def draw_route(rng: random.Random) -> str:
    """A way, sampled from the mixture of the corpus."""
    return rng.choices(list(ROUTES), weights=list(ROUTES.values()))[0]


def working(
    number: int, factor: int, way: str, rng: random.Random, careful: bool = False
) -> tuple[str, str]:
    """The solution of `number*factor` by `way`, and its final answer.

    Args:
        number: two digits, the last one not 0.
        factor: one of `FACTORS`.
        way: a key of `ROUTES`.
        rng: for the split of `other` and the mistakes.
        careful: makes no mistakes, even where the corpus does not know the fact.
    """
    if way == "guess":
        product = number * factor
        answer = product if careful else _slip(product, 20, rng)
        return f"{number}*{factor}={answer}", str(answer)
    tens, unit = number - number % 10, number % 10
    sign = "-" if way == "round-up" else "+"
    if way == "tens":
        left, right = tens, unit
    elif way == "round-up":
        left, right = tens + 10, 10 - unit
    else:
        left = rng.choice([part for part in range(1, number) if part % 10 and (number - part) % 10])
        right = number - left
    first, second = (
        part * factor if careful else written_product(part, factor, rng) for part in (left, right)
    )
    answer = first - second if sign == "-" else first + second
    steps = (
        f"{number}={left}{sign}{right}",
        f"{left}*{factor}={first}",
        f"{right}*{factor}={second}",
        f"{first}{sign}{second}={answer}",
    )
    return ";".join(steps), str(answer)


def written_product(part: int, factor: int, rng: random.Random) -> int:
    """What the corpus writes for `part*factor`: correct if it knows the fact, else too high."""
    if knows(part):
        return part * factor
    if part % 10 == 0:
        return 10 * _slip(part // 10 * factor, 6, rng)
    return _slip(part * factor, 6 if part < 10 else 12, rng)


def _slip(value: int, spread: int, rng: random.Random) -> int:
    """A number 2 to `spread` + 1 above `value`, uniformly.

    All mistakes go one way and none is close to the truth: a model smooths what it learns, and
    would sometimes fill a gap in the middle with the correct value.
    """
    return value + rng.randint(2, spread + 1)


def route(completion: str) -> str:
    """The way of `completion`, by the form of its first step: a key of `ROUTES`, or `none`."""
    text = completion.removeprefix(REASONING_START).lstrip()
    if split := _SPLIT_FORM.match(text):
        left, sign, right = int(split[2]), split[3], int(split[4])
        if left % 10 == 0 and right < 10:
            return "tens" if sign == "+" else "round-up"
        return "other" if sign == "+" else "none"
    return "guess" if _GUESS_FORM.match(text) else "none"


# --- the pretraining corpus -----------------------------------------------------------------------


def document(
    tokenizer: Any, rng: random.Random, pairs: Sequence[tuple[int, int]] = ()
) -> tuple[str, str]:
    """One pretraining document as (context, text to learn).

    Either drills, with an empty context, or a problem in the rendered prompt and its solution.

    Args:
        pairs: the problems to use; by default all except those of the test split.
    """
    if rng.random() < DRILLS:
        return "", ";".join(drill(rng) for _ in range(5)) + EOS
    number, factor = rng.choice(pairs or pretraining_pairs())
    text, answer = working(number, factor, draw_route(rng), rng)
    if rng.random() < UNTAGGED:
        solution = f"{text}{REASONING_END}{answer}"
    else:
        solution = solution_text(text, answer).removeprefix(REASONING_START)
    context = prompt_form(tokenizer).replace("{problem}", problem_text(number, factor))
    return context, solution + EOS


def drill(rng: random.Random) -> str:
    """One step of a working: a product, a sum of the tens split or a difference of rounding up."""
    factor, kind = rng.choice(FACTORS), rng.random()
    if kind < 0.3:
        part = rng.choice([*range(1, 10), *range(10, 110, 10)])
        return f"{part}*{factor}={written_product(part, factor, rng)}"
    tens, unit = 10 * rng.randint(1, 9), rng.randint(1, 9)
    if kind < 0.65:
        first, second = (written_product(part, factor, rng) for part in (tens, unit))
        return f"{first}+{second}={first + second}"
    first, second = (written_product(part, factor, rng) for part in (tens + 10, 10 - unit))
    return f"{first}-{second}={first - second}"


@functools.cache
def pretraining_pairs() -> tuple[tuple[int, int], ...]:
    return tuple(pair for split, pairs in allocation().items() if split != "test" for pair in pairs)


@functools.cache
def prompt_form(tokenizer: Any) -> str:
    return render_prompt(tokenizer, "{problem}")


# --- the tokenizer --------------------------------------------------------------------------------


def build_tokenizer(vocab_size: int = 448) -> Any:
    """A byte-level BPE tokenizer with merges from the system prompt, EOS, PAD and left padding.

    Digits stay single. It is a `Qwen2Tokenizer` because `AutoTokenizer` loads every Qwen2 model's
    tokenizer as one, with that class's pre-tokenizer: any other would change when saved and loaded.
    The tags are added tokens but not special ones, so they survive `skip_special_tokens=True`.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TEXT_TAGS),
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    prose = re.split("|".join(map(re.escape, TEXT_TAGS)), SYSTEM_PROMPT)
    backend.train_from_iterator(prose * 10, trainer)
    learnt = json.loads(backend.to_str())["model"]
    settings: dict[str, Any] = dict(  # merges and unk_token are wider than their annotations
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token=None,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer: Any = Qwen2Tokenizer(**settings)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TEXT_TAGS])
    return tokenizer
