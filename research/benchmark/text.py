"""A benchmark's report as text: `report.md`, and a table of the documentation."""

from collections.abc import Callable, Mapping
from typing import Any

from research.benchmark.records import BASELINE, SFT
from research.benchmark.report_tables import (
    cell,
    claims_table,
    difference_table,
    level_table,
    markdown_table,
    routes_table,
    training_table,
)
from sage_unsloth.study.crossed import Components, detectable_difference
from sage_unsloth.study.verdicts import MATTERS
from sage_unsloth.training.algorithms import ALGORITHMS


def conditions(report: Mapping[str, Any]) -> str:
    """One sentence that says what the numbers are of."""
    seeds, environment = report["seeds"], report["environment"]
    packages = environment["packages"]
    settings = report["settings"]["rlvr"]
    return (
        f"{report['title']}; {len(seeds)} training seed{'s' * (len(seeds) > 1)} "
        f"({', '.join(map(str, seeds))}) of each algorithm from one SFT model, "
        f"{settings['max_steps']} steps of {settings['prompts_per_step']} x "
        f"{settings['num_generations']} completions, learning rate "
        f"{settings['learning_rate']:g}, β "
        f"{report['settings'].get('beta', ALGORITHMS[BASELINE].beta):g}; "
        f"{report['num_problems']['test']} held-out problems, {report['num_samples']['test']} "
        f"samples each at T = {report['settings']['sampling']['temperature']:g}; "
        f"unsloth {packages['unsloth']}, torch {packages['torch']}, {environment['date'][:10]}"
    )


def intervals(report: Mapping[str, Any]) -> str:
    """What the brackets are of."""
    if len(report["seeds"]) == 1:
        return (
            "[ ]: 95 % over problems alone (Student's t; differences are paired by problem). "
            "With one training seed no interval has the "
            "chance of training in it, so no claim is judged."
        )
    return (
        "[ ]: 95 % over training seeds and problems at once (Student's t by the two-way layout; "
        "differences are paired by seed and problem). "
        "The SFT model was trained once, so its interval is over problems alone, and differences "
        "to it hold for this SFT model."
    )


def seen_lines(report: Mapping[str, Any]) -> list[str]:
    """The differences that the benchmark could find, by the variances that it measured."""
    sizes = (len(report["seeds"]), report["num_problems"]["test"])
    return [f"{pair}: {_detectable(by_k, *sizes)}" for pair, by_k in report["components"].items()]


def _detectable(by_k: Mapping[str, Mapping[str, float]], seeds: int, problems: int) -> str:
    """`pass@1 .013, pass@16 .021`, of the variance components of each."""
    return ", ".join(
        f"{title} {detectable_difference(Components(**result), seeds, problems):.3f}"
        for title, result in by_k.items()
    )


def markdown(report: Mapping[str, Any]) -> str:
    """`report.md`."""
    parts = [f"# Benchmark: {report['title']}", conditions(report) + ".", intervals(report)]
    parts += _claims(report) + _held_out(report) + _out_of_distribution(report)
    if routes := routes_table(report):
        parts += [
            "## The rare way",
            "Before RL (sft) and after, on the held-out problems.",
            markdown_table(routes),
        ]
    parts += [
        "## Training",
        "Means over seeds of the thirds of training; does a higher reward come with a higher "
        "pass@k (Fig. 2)?",
        markdown_table(training_table(report)),
    ]
    if seen := seen_lines(report):
        parts += [
            "## Power",
            "A true difference that this design finds 4 times in 5, by the variances that it "
            "measured:",
            "\n".join(f"- {line}" for line in seen),
        ]
    if report["not_run"]:
        parts.append(f"Not run, so their claims are not judged: {', '.join(report['not_run'])}.")
    return "\n\n".join(parts) + "\n"


def _claims(report: Mapping[str, Any]) -> list[str]:
    return [
        "## The paper's claims",
        f'{_counts(report)}. A gain or loss counts as none below {MATTERS:g}: "supported" is an '
        f'interval beyond 0 on the claimed side, "not supported" one that excludes a difference of '
        f'{MATTERS:g} there, "undecided" the rest. Of as many intervals as there are rows, one in '
        "twenty misses by chance.",
        markdown_table(claims_table(report)),
        "![differences to grpo](differences.png)",
    ]


def _counts(report: Mapping[str, Any]) -> str:
    verdicts = [claim["verdict"] for claim in report["claims"]]
    names = ("supported", "not supported", "undecided")
    return ", ".join(f"{verdicts.count(name)} {name}" for name in names)


def _held_out(report: Mapping[str, Any]) -> list[str]:
    def table(keep: Callable[[str], bool]) -> list[list[str]]:
        return difference_table(report, "test", keep)

    parts = [
        "## Held-out problems",
        markdown_table(level_table(report, "test")),
        "Against grpo, the same seeds and problems:",
        markdown_table(table(_vs_baseline)),
        "Against the SFT model:",
        markdown_table(table(_vs_sft)),
    ]
    if special := table(lambda pair: not _vs_baseline(pair) and not _vs_sft(pair)):
        parts += [
            "Pairs in which only the guide, or guide and KL, differ:",
            markdown_table(special),
        ]
    parts.append("![pass@k](pass_at_k.png)")
    for family in report["pass_at_k"]["test"]:
        if family != "all":
            parts += [f"### Family: {family}", markdown_table(level_table(report, "test", family))]
    return parts


def _out_of_distribution(report: Mapping[str, Any]) -> list[str]:
    names = [name for name in report["pass_at_k"] if name != "test"]
    parts = ["## Out of distribution"] if names else []
    for name in names:
        parts += [
            f"### {name}",
            markdown_table(level_table(report, name)),
            markdown_table(difference_table(report, name, _vs_baseline)),
        ]
    return parts


def _vs_baseline(pair: str) -> bool:
    return pair.endswith(f" - {BASELINE}")


def _vs_sft(pair: str) -> bool:
    return pair.endswith(f" - {SFT}")


# --- the short report, for `docs/tables/` ---------------------------------------------------------


def readme_section(report: Mapping[str, Any], folder: str) -> str:
    """The results of one task in a page: levels, verdicts, and links to the rest.

    Args:
        report: of the task.
        folder: where its figures and tables are, from the page.
    """
    levels = level_table(report, "test")
    short = [
        [row[0], row[1], row[-2] if len(row) > 3 else row[-1], row[-1]] if len(row) > 3 else row
        for row in levels
    ]
    against = {
        pair.split(" - ")[0]: row
        for pair, row in report["differences"]["test"]["all"].items()
        if _vs_baseline(pair)
    }
    last = list(next(iter(report["pass_at_k"]["test"]["all"].values())))[-1]
    rows = [[*short[0], f"pass@{last} − grpo"]]
    rows += [
        [
            f"`{row[0]}`",
            *row[1:],
            cell(against[row[0]][last], sign=True) if row[0] in against else "",
        ]
        for row in short[1:]
    ]
    claims = [[row[0], row[2], row[3], row[4]] for row in claims_table(report)]
    judged = [
        f"Claims of the paper, or of its theory: {_counts(report)}. A gain below {MATTERS:g} "
        "counts as none.",
        markdown_table(claims),
    ]
    return "\n\n".join(
        [
            f"**{report['title']}:** {conditions(report).partition('; ')[2]}. {intervals(report)}",
            markdown_table(rows),
            *(judged if len(report["seeds"]) > 1 else []),
            f"![differences to grpo]({folder}/differences.png)",
            "Curves, families, out-of-distribution sets, training and power: "
            f"[report]({folder}/report.md); every count: "
            f"[records.json]({folder}/records.json).",
        ]
    )
