"""Measures how often intervals of pass@k hold the truth, ours beside the bootstrap over problems.

    python -m research.coverage --out data/results/coverage

Problems are drawn from kinds whose mean pass@k is known: each has its chance of being solved, and
256 samples. Of many such evaluations, 95 in 100 intervals should hold the truth. Beside how many
did stands how many of the percentile bootstrap's (Efron, 1979; 1,000 resamples) did, and the ratio
of the widths.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from sage_unsloth.evaluation.intervals import paired_interval, score_interval
from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.progress import progress
from sage_unsloth.runs.record import environment

Chances = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

SAMPLES, DRAWN_FOR_TRUTH, RESAMPLES = 256, 1_000_000, 1_000
PROBLEMS, KS = (30, 60, 200), (1, 16, 256)


def _beta(a: float, b: float) -> Chances:
    return lambda generator, size: generator.beta(a, b, size)


def _rarely_hard(generator: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    hard = 10 ** generator.uniform(-4, -1, size)
    return np.where(generator.random(size) < 0.1, hard, generator.beta(8, 2, size))


SHAPES: dict[str, Chances] = {
    "every difficulty, Beta(1, 2)": _beta(1, 2),
    "mostly hard, Beta(.15, 1.5)": _beta(0.15, 1.5),
    "hard or easy, Beta(.5, .5)": _beta(0.5, 0.5),
    "mostly easy, Beta(2, .2)": _beta(2, 0.2),
    "one in ten hard": _rarely_hard,
    "all alike, Beta(20, 20)": _beta(20, 20),
}
SHIFT, SPREAD, GAINED = 0.3, 0.5, 0.05


def _other_model(how: str, chances: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The chances of model a where those of model b are `chances`."""
    if how == "the same model":
        return chances
    if how == "a few problems gained":
        gained = generator.random(chances.shape) < GAINED
        return np.where(gained, np.maximum(chances, 0.5), chances)
    odds = np.log(chances) - np.log1p(-chances)
    shift = SHIFT if how == "a little better" else generator.normal(0, SPREAD, chances.shape)
    return 1 / (1 + np.exp(-odds - shift))


PAIRS = ("the same model", "a little better", "better and worse", "a few problems gained")


def bootstrap(values_EP: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The 2.5 and 97.5 % quantiles of means over resampled problems, (E, 2); E evaluations."""
    problems = values_EP.shape[1]
    times_RP = generator.multinomial(problems, np.full(problems, 1 / problems), size=RESAMPLES)
    means_RE = times_RP.astype(float) @ values_EP.T / problems
    return np.quantile(means_RE, (0.025, 0.975), axis=0).T


def ends(intervals: list) -> np.ndarray:
    """Both ends of each, (E, 2)."""
    return np.array([(result.low, result.high) for result in intervals])


def measure(truth: float, intervals: np.ndarray, bootstraps: np.ndarray) -> dict[str, float | None]:
    """Shares of intervals, (E, 2), that hold the truth, and mean widths.

    1e-12 aside: a mean of ones is 1 to rounding.
    """
    shares = [
        float(((result[:, 0] <= truth + 1e-12) & (truth <= result[:, 1] + 1e-12)).mean())
        for result in (intervals, bootstraps)
    ]
    widths = [float((result[:, 1] - result[:, 0]).mean()) for result in (intervals, bootstraps)]
    return {
        "truth": truth,
        "holds": shares[0],
        "bootstrap_holds": shares[1],
        "width": widths[0],
        "bootstrap_width": widths[1],
    }


def one_model(chances: Chances, problems: int, evaluations: int) -> Iterator[dict]:
    """Rows of `measure` for the mean pass@k of one model, one for each of `KS`."""
    generator = np.random.default_rng(0)
    truth = chances(generator, (DRAWN_FOR_TRUTH,))
    counts = generator.binomial(SAMPLES, chances(generator, (evaluations, problems)))
    for k in KS:
        values_EP = np.asarray(pass_at_k(SAMPLES, counts, k))
        intervals = [score_interval(values_P[None]) for values_P in values_EP]
        mean = float(np.mean(1 - (1 - truth) ** k))
        yield {"k": k} | measure(mean, ends(intervals), bootstrap(values_EP, generator))


def two_models(chances: Chances, how: str, problems: int, evaluations: int) -> Iterator[dict]:
    """The same for the difference of two models on the same problems."""
    generator = np.random.default_rng(0)

    def draw(size: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        b = np.clip(chances(generator, size), 1e-12, 1 - 1e-12)
        return _other_model(how, b, generator), b

    truth_a, truth_b = draw((DRAWN_FOR_TRUTH,))
    counts_a, counts_b = (generator.binomial(SAMPLES, p) for p in draw((evaluations, problems)))
    for k in KS:
        a_EP, b_EP = (np.asarray(pass_at_k(SAMPLES, counts, k)) for counts in (counts_a, counts_b))
        pairs = zip(a_EP, b_EP, strict=True)
        intervals = [paired_interval(a_P[None], b_P[None]) for a_P, b_P in pairs]
        mean = float(np.mean((1 - truth_b) ** k - (1 - truth_a) ** k))
        yield {"k": k} | measure(mean, ends(intervals), bootstrap(a_EP - b_EP, generator))


def several_seeds(seeds: int, problems: int, evaluations: int) -> Iterator[dict]:
    """One model trained with S seeds, each of which shifts all its chances; k = 1.

    The bootstrap beside it resamples problems and seeds independently.
    """
    generator = np.random.default_rng(0)
    intervals, bootstraps = [], []
    for _ in range(evaluations):
        chances_P = generator.beta(1, 2, size=problems)
        shifts_S = generator.normal(0, 0.15, size=seeds)
        # On the logit scale of a half; its mean over the shifts is that of the chances.
        chances_SP = np.clip(chances_P + shifts_S[:, None] * chances_P * (1 - chances_P) * 4, 0, 1)
        values_SP = generator.binomial(SAMPLES, chances_SP) / SAMPLES
        intervals.append(score_interval(values_SP))
        problems_RP = generator.integers(problems, size=(RESAMPLES, problems))
        seeds_RS = generator.integers(seeds, size=(RESAMPLES, seeds))
        means_R = values_SP[seeds_RS].mean(axis=1)
        means_R = np.take_along_axis(means_R, problems_RP, axis=1).mean(axis=1)
        bootstraps.append(np.quantile(means_R, (0.025, 0.975)))
    yield {"k": 1} | measure(1 / 3, ends(intervals), np.array(bootstraps))


def all_cases(evaluations: int) -> list[tuple[dict, Callable[[], Iterator[dict]]]]:
    """What each simulated case is, and what gives its rows of `measure`."""
    cases: list[tuple[dict, Callable[[], Iterator[dict]]]] = []
    for shape, chances in SHAPES.items():
        for problems in PROBLEMS:
            label = {"problems": problems, "shape": shape}
            run = partial(one_model, chances, problems, evaluations)
            cases.append(({"of": "one model"} | label, run))
            for how in PAIRS:
                run = partial(two_models, chances, how, problems, evaluations)
                cases.append(({"of": how} | label, run))
    for seeds in (3, 8):
        label = {"of": f"one model, {seeds} seeds", "problems": 60, "shape": next(iter(SHAPES))}
        cases.append((label, partial(several_seeds, seeds, 60, evaluations)))
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/coverage"))
    parser.add_argument(
        "--evaluations", type=int, default=1_000, help="of each case (default: %(default)s)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cases = progress(all_cases(options.evaluations), desc="cases")
    rows = [label | row for label, run in cases for row in run()]
    result = {"evaluations": options.evaluations, "rows": rows, "environment": environment()}
    write_json(options.out / "coverage.json", result)
    print(json.dumps({"cases": len(rows), "least": min(row["holds"] for row in rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
