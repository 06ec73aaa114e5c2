"""What a frontier's report must say beside its differences, all from the same counts.

    ks          pass@k at several k, beside what blind guessing solves; which k gets a verdict
    start       the SFT model from more samples, where `start_model.json` lies beside the records
    mixture     some attempts by the SFT model: the line that costs nothing, and who is above it
    line        who is above GRPO's line, interpolated only where it is known
    dose        how much each guide did, and what that could change
    families    whose gain and whose loss it is
    registered  the claims that were written down before, after Holm

Shapes: S seeds, P problems, U units.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from research.benchmark.design import SFT
from research.frontier.design import BASELINE
from research.frontier.dose import guide_pairs
from research.frontier.guessing import blind_chances
from research.frontier.records import FrontierRecords, by_unit
from research.frontier.registered import REGISTERED, judge_registered
from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.objective.guides import Q_MAX, BranchGuide
from sage_unsloth.study.chord import Place, distance_to_chord, find_neighbours
from sage_unsloth.study.crossed import (
    CrossedEstimate,
    components,
    crossed_interval,
    detectable_difference,
)
from sage_unsloth.study.dose import is_negligible, measure_dose, possible_change
from sage_unsloth.study.families import family_curves, family_parts, family_weights
from sage_unsloth.study.guessing import guess_bounds, main_k, says_something
from sage_unsloth.study.mixture import (
    bracketing_share,
    mixture_pass_at_k,
    random_attempt,
)
from sage_unsloth.training.algorithms import ALGORITHMS

KS = (1, 4, 8, 16, 32)


class Counts:
    """Tables of pass@k by point, the SFT model's from its many samples where there are some."""

    def __init__(self, data: Mapping[str, Any], start: Mapping[str, Any] | None):
        self.data = data
        self.records = FrontierRecords(data)
        records = self.records
        self.task, self.problems = str(data["task"]), str(data["problems"])
        self.start = start
        self.ks = [k for k in KS if k <= records.num_samples]
        self.families = data["sets"][records.set]["families"]
        self.line = next(m for m in records.methods().values() if BASELINE in m)
        self.strengths = [float(records.points[item]["strength"]) for item in self.line]

    def correct(self, point: str) -> tuple[int, np.ndarray]:
        """n and the (S, P) counts of a point."""
        records = self.records
        if point == SFT and self.start is not None:
            row = np.array(self.start["correct"])
            return self.start["num_samples"], np.tile(row, (len(records.seeds), 1))
        counts = [run["sets"][records.set]["correct"] for run in records.of(point)]
        return records.num_samples, np.array(counts)

    def by_problem(self, point: str, k: int) -> np.ndarray:
        return np.asarray(pass_at_k(*self.correct(point), k))

    def by_unit(self, point: str, k: int) -> np.ndarray:
        return by_unit(self.by_problem(point, k), self.records.units)

    def place(self, point: str, k: int) -> Place:
        return Place(self.by_unit(point, 1), self.by_unit(point, k))

    def mixed(self, m: int, k: int) -> Place:
        """`BASELINE` with m of k attempts by the SFT model."""
        (n, trained), (start_n, start) = self.correct(BASELINE), self.correct(SFT)
        many = mixture_pass_at_k(n, trained, start_n, start, k, m)
        first = random_attempt(
            {"start": self.by_unit(SFT, 1), "trained": self.by_unit(BASELINE, 1)}, m, k
        )
        return Place(first, by_unit(many, self.records.units))


def make_checks(data: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `checks.json` holds.

    Args:
        data: what `records.json` holds.
        start: what `start_model.json` holds, if there is one.
    """
    counts = Counts(data, start)
    ks = _ks(counts)
    points = [point for point in counts.records.algorithms if point != SFT]
    return {
        "k": main_k(ks),
        "ks": ks,
        "start": _start(counts),
        "points": {point: {str(k): _at_k(counts, point, k) for k in counts.ks} for point in points},
        "line": {
            point: _beside_line(counts, point) for point in points if point not in counts.line
        },
        "mixture": _mixture(counts, points),
        "dose": _doses(counts),
        "families": _families(counts),
        "registered": _registered(counts, ks),
    }


def _json(result: CrossedEstimate) -> dict[str, float]:
    return {"mean": result.mean, "low": result.low, "high": result.high}


def _ks(counts: Counts) -> dict[str, dict[str, Any]]:
    """k -> the SFT model's and GRPO's pass@k, the bound of guessing, whether a verdict is given."""
    records = counts.records
    chances = blind_chances(counts.task, records.data["sets"][records.set]["problems"])
    rows: dict[str, dict[str, Any]] = {}
    for k in counts.ks:
        start = float(counts.by_unit(SFT, k).mean())
        row: dict[str, Any] = {"sft": start, "grpo": float(counts.by_unit(BASELINE, k).mean())}
        if chances is None:
            row |= {"guess": None, "usable": True}
        else:
            guess = by_unit(guess_bounds(chances, [k])[k][None], records.units)
            row |= {"guess": float(guess.mean())}
            row |= {"usable": says_something(row["guess"], start)}
        rows[str(k)] = row
    return rows


def _start(counts: Counts) -> dict[str, Any] | None:
    """The SFT model's pass@k from its few and its many samples."""
    if counts.start is None:
        return None
    few = Counts(counts.data, None)
    return {
        "num_samples": counts.start["num_samples"],
        "repeats": counts.start["repeats"],
        "problems": counts.start["problems"],
        "few": {str(k): float(few.by_unit(SFT, k).mean()) for k in counts.ks},
        "many": {str(k): float(counts.by_unit(SFT, k).mean()) for k in counts.ks},
    }


def _at_k(counts: Counts, point: str, k: int) -> dict[str, Any]:
    table = counts.by_unit(point, k)
    result = {
        "mean": float(table.mean()),
        "to_sft": _json(crossed_interval(table - counts.by_unit(SFT, k))),
    }
    if point != BASELINE:
        result["to_baseline"] = _json(crossed_interval(table - counts.by_unit(BASELINE, k)))
    return result


def _line_estimate(counts: Counts, point: Place, k: int) -> CrossedEstimate | str:
    """A place beside GRPO's line at k, or why there is no value."""
    first_L = [float(counts.by_unit(item, 1).mean()) for item in (*counts.line, SFT)]
    ends = find_neighbours(float(point.first.mean()), first_L, [*counts.strengths, np.inf])
    if isinstance(ends, str):
        return ends
    item, other = (counts.place(counts.line[end], k) for end in ends)
    return distance_to_chord(point, item, other)


def _beside_line(counts: Counts, point: str) -> dict[str, Any]:
    """k -> distance with interval; or `why` there is none."""
    result = {str(k): _line_estimate(counts, counts.place(point, k), k) for k in counts.ks if k > 1}
    refused = next((item for item in result.values() if isinstance(item, str)), None)
    if refused is not None:
        return {"why": refused}
    return {k: _json(item) for k, item in result.items() if isinstance(item, CrossedEstimate)}


def _mixture_estimate(counts: Counts, point: str, k: int) -> CrossedEstimate | None:
    """A point beside the mixtures of GRPO and the SFT model at k; None where none has its
    pass@1.
    """
    level, first, start = (float(counts.by_unit(item, 1).mean()) for item in (point, BASELINE, SFT))
    m = bracketing_share(level, first, start, k)
    if m is None:
        return None
    return distance_to_chord(counts.place(point, k), counts.mixed(m, k), counts.mixed(m + 1, k))


def _mixture(counts: Counts, points: Sequence[str]) -> dict[str, Any]:
    """The mixtures' own values, and each point's distance to their line."""
    rows = []
    for k in counts.ks[1:]:
        for m in [m for m in counts.ks if m <= k // 2]:
            mixed = counts.mixed(m, k)
            line = _line_estimate(counts, mixed, k)
            rows.append(
                {
                    "k": k,
                    "m": m,
                    "random": float(mixed.first.mean()),
                    "many": float(mixed.many.mean()),
                    "to_baseline": _json(
                        crossed_interval(mixed.many - counts.by_unit(BASELINE, k))
                    ),
                    "to_line": _json(line) if isinstance(line, CrossedEstimate) else None,
                }
            )
    beside = {}
    for point in points:
        if point != BASELINE:
            result = {str(k): _mixture_estimate(counts, point, k) for k in counts.ks[1:]}
            beside[point] = {k: _json(item) for k, item in result.items() if item is not None}
    return {"rows": rows, "beside": beside}


def _doses(counts: Counts) -> list[dict[str, Any]]:
    """Each guided point: what its guide did, what that could change, what the design can show."""
    records, k = counts.records, counts.records.k
    line_of = {item: line for line in records.methods().values() for item in line}
    rows = []
    for point, twin in guide_pairs(records):
        dose = measure_dose(records.of(point))
        if dose is None:
            continue
        difference = counts.by_unit(point, k) - counts.by_unit(twin, k)
        detectable = None
        if min(difference.shape) > 1:
            detectable = detectable_difference(components(difference), *difference.shape)
        row = {"point": point, "twin": twin} | dose
        row |= {"difference": _json(crossed_interval(difference)), "detectable": detectable}
        possible = None
        # Only Branch multiplies the pull to the reference whatever the token.
        if isinstance(ALGORITHMS[records.points[point]["algorithm"]].guide, BranchGuide):
            line = line_of[twin]
            strengths = [float(records.points[item]["strength"] or 0) for item in line]
            many = [float(counts.by_unit(item, k).mean()) for item in line]
            place = line.index(twin)
            possible = possible_change(dose["guide_mean"], place, many, strengths)
            at_clip = possible_change(Q_MAX, place, many, strengths)
            row |= {"possible": possible, "possible_at_clip": at_clip}
        row["no_verdict"] = is_negligible(possible, detectable)
        rows.append(row)
    return rows


def _families(counts: Counts) -> dict[str, Any]:
    """Curves of the SFT model and GRPO within each family, and what each adds to the change."""
    weights = family_weights(counts.families, counts.records.units)
    curves = {
        point: family_curves({k: counts.by_problem(point, k) for k in counts.ks}, counts.families)
        for point in (SFT, BASELINE)
    }
    parts = family_parts(curves[SFT], curves[BASELINE], weights)
    return {"weights": weights, "curves": curves, "parts": parts}


def _registered(counts: Counts, ks: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    written = REGISTERED.get((counts.task, counts.problems), {})
    claims = {
        point: letters for point, letters in written.items() if point in counts.records.points
    }
    k = counts.records.k

    def estimate(point: str, claim: str) -> CrossedEstimate | None:
        if claim == "a":
            return crossed_interval(counts.by_unit(point, 1) - counts.by_unit(BASELINE, 1))
        if not ks[str(k)]["usable"]:
            return None
        if claim == "d":
            result = _line_estimate(counts, counts.place(point, k), k)
            return result if isinstance(result, CrossedEstimate) else None
        return crossed_interval(
            counts.by_unit(point, k) - counts.by_unit({"b": SFT, "c": BASELINE}[claim], k)
        )

    return judge_registered(claims, estimate)
