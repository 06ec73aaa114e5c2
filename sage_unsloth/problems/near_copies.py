r"""Which problems of a benchmark are in a training set in other words.

A problem is compared as the set of its content words, without endings, and the set of its numbers,
`1,000`, `1000` and "one thousand" alike. Its score against a training problem is

    score = (sum of w(x) over the words x that both have / sum of w(x) over the problem's words)
            * (numbers that both have / the problem's numbers)

with w(x) = 1 + log((1 + D) / (1 + d(x))), D all problems and d(x) those with the word: rare words
say more. Order and further text do not count, so that sentences may have changed places.
data/results/overlap has which scores paraphrases and strangers get.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sage_unsloth.problems.benchmarks import Benchmark

NEAR = 0.4
"""The score from which a problem is listed (`docs/evaluation.md` has what it finds)."""
CANDIDATES = 20  # training problems whose score is computed, of those that share the rarest words

_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen"""
_NUMBERS = {name: value for value, name in enumerate(_ONES.split())}
_NUMBERS |= {"half": 0.5, "twice": 2, "double": 2, "thrice": 3, "triple": 3, "dozen": 12}
_TENS_NAMES = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {name: 10 * value for value, name in enumerate(_TENS_NAMES.split(), start=2)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_STOP_WORDS = """
    a an the of to in on at by for from with as is are was were be been has have had do does did
    and or but if then so that this these those it its he she his her him they their them there
    what which who how many much find value number total all each every per than more less not no
    will would can could into out up down when where after before also only just let we you
"""
_STOP = frozenset(_STOP_WORDS.split())
_TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+|[^\W\d_]+")
_ENDINGS = re.compile(r"(?<=\w{3})(?:ing|ies|ed|es|ly|s|y|e)$")


def words_and_numbers(text: str) -> tuple[frozenset[str], frozenset[float]]:
    """The content words of a problem without their endings, and its numbers."""
    words: set[str] = set()
    numbers: set[float] = set()
    last: float | None = None  # a number in words that goes on: "twenty", "three hundred"
    for token in _TOKEN.findall(re.sub(r"\\[a-zA-Z]+", " ", text.lower())):
        if token[0].isdecimal() or token[0] == ".":
            numbers.add(float(token.replace(",", "")))
            last = None
        elif token in _SCALES:
            numbers.discard(last or 1)
            last = float((last or 1) * _SCALES[token])
            numbers.add(last)
        elif token in _TENS or token in _NUMBERS:
            value = float(_TENS.get(token, _NUMBERS.get(token, 0)))
            if last is not None and value < 10 and last % 10 == 0 and last % 100:
                numbers.discard(last)
                value += last
            numbers.add(value)
            last = value
        else:
            last = None
            if token not in _STOP:
                words.add(_ENDINGS.sub("", token))
    return frozenset(words), frozenset(numbers)


def near_copies(
    training: Sequence[Mapping[str, Any]], benchmark: Benchmark, threshold: float = NEAR
) -> list[dict[str, Any]]:
    """The benchmark's problems that are much like a training problem.

    Args:
        training: rows with `problem`.
        benchmark: whose rows are looked for.
        threshold: least score, in (0, 1].

    Returns:
        A row for each: `id`; `score`; `training_row`, the number of the most alike one, from 0; and
        `training_problem`, its text.

    Raises:
        ValueError: the threshold is out of range.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"the threshold of near copies must be in (0, 1], got {threshold}")
    copies = []
    for row, (score, place) in zip(
        benchmark.rows,
        best_scores([row["problem"] for row in benchmark.rows], [r["problem"] for r in training]),
        strict=True,
    ):
        if score >= threshold:
            text = training[place]["problem"]
            copies.append(
                {
                    "id": row["id"],
                    "score": round(score, 3),
                    "training_row": place,
                    "training_problem": text,
                }
            )
    return copies


def best_scores(problems: Sequence[str], training: Sequence[str]) -> list[tuple[float, int]]:
    """The best score of each problem, and the training problem that it is against."""
    mine, corpus = [[words_and_numbers(t) for t in texts] for texts in (problems, training)]
    documents = Counter(word for words, _ in (*mine, *corpus) for word in words)
    total = len(mine) + len(corpus)
    weight = {word: 1 + math.log((1 + total) / (1 + count)) for word, count in documents.items()}
    rows_with: dict[str, list[int]] = defaultdict(list)
    for place, (words, _) in enumerate(corpus):
        for word in words:
            rows_with[word].append(place)
    return [_best(item, corpus, weight, rows_with) for item in mine]


def _best(
    problem: tuple[frozenset[str], frozenset[float]],
    corpus: Sequence[tuple[frozenset[str], frozenset[float]]],
    weight: Mapping[str, float],
    rows_with: Mapping[str, Sequence[int]],
) -> tuple[float, int]:
    words, numbers = problem
    whole = sum(weight[word] for word in words)
    shared: Counter[int] = Counter()
    for word in words:
        for place in rows_with.get(word, ()):
            shared[place] += weight[word]  # pyright: ignore[reportArgumentType]
    best = 0.0, 0
    for place, common in shared.most_common(CANDIDATES):
        others = corpus[place][1]
        share = len(numbers & others) / len(numbers) if numbers else 1.0
        best = max(best, (common / whole * share if whole else 0.0, place))
    return best
