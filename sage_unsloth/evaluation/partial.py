"""The part of incomplete sets that all models have, for a first report.

Samples count from 0 without a gap. All problems stay in the report if every model has a sample of
each, which is soon the case, because all problems are first sampled a few times. Otherwise the
largest number of problems times samples is used. The problems left out are not random: those with
long completions end last.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.sampling.record_files import read_settings

Set = tuple[dict[str, Any], list[dict]]
"""Settings and records of a record set."""


def shared_part(
    files: Sequence[Path], sets: Sequence[Set]
) -> tuple[list[Set], dict[str, dict[str, Any]]]:
    """The sets, reduced to what all sets on the same benchmark have.

    Args:
        files: of the sets, for the problems of the benchmark.

    Returns:
        The sets, and by benchmark: `problems` used, `of` how many, `samples`, and `left_out`, the
            number of completions that are not used.

    Raises:
        ValueError: the sets on a benchmark have no sample of a problem in common.
    """
    of_benchmark: dict[str, list[int]] = defaultdict(list)
    for number, (settings, _) in enumerate(sets):
        of_benchmark[settings["benchmark"]].append(number)
    cut, result = list(sets), {}
    for benchmark, numbers in of_benchmark.items():
        requested = dict.fromkeys(p for i in numbers for p in read_settings(files[i])["prompts"])
        lengths = [_lengths(sets[i][1]) for i in numbers]
        least = {
            problem: min(length.get(problem, 0) for length in lengths) for problem in requested
        }
        problems, samples = largest_part(least)
        if not samples:
            raise ValueError(
                "a partial report needs a problem of which every set has a sample, but those on "
                f"{benchmark} have none in common. Draw more (evaluate), or leave a set out: "
                + ", ".join(str(files[i]) for i in numbers)
            )
        left_out = 0
        for i in numbers:
            settings, records = sets[i]
            selected = [r for r in records if r["problem_id"] in problems and r["sample"] < samples]
            cut[i] = (settings, selected)
            left_out += len(records) - len(selected)
        result[benchmark] = {"problems": len(problems), "of": len(requested), "samples": samples}
        result[benchmark]["left_out"] = left_out
    return cut, result


def largest_part(least: Mapping[str, int]) -> tuple[set[str], int]:
    """The problems and the number of samples to use.

    All problems if each has a sample; else the largest number of problems times samples, more
    problems before more samples.

    Args:
        least: problem -> samples that every set has of it.
    """
    if least and min(least.values()):
        return set(least), min(least.values())
    sizes = sorted({n for n in least.values() if n})
    selected = {n: {problem for problem, has in least.items() if has >= n} for n in sizes}
    samples = max(sizes, key=lambda n: (n * len(selected[n]), -n), default=0)
    return selected.get(samples, set()), samples


def _lengths(records: Sequence[dict]) -> dict[str, int]:
    """problem -> number of graded samples from 0 on without a gap."""
    samples: dict[str, set[int]] = defaultdict(set)
    for record in records:
        if "grade" in record:
            samples[record["problem_id"]].add(record["sample"])
    return {
        problem: next(n for n in range(len(result) + 1) if n not in result)
        for problem, result in samples.items()
    }
