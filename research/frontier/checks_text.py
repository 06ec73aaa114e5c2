"""The checks of a frontier as text: a table for each, with what it says in a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

from research.benchmark.records import SFT
from research.benchmark.report_tables import cell, markdown_table
from research.frontier.records import BASELINE
from sage_unsloth.study.chord import LARGEST_STEP
from sage_unsloth.study.verdicts import MAX_GUESS_SHARE

NO_VALUE = "–"


def check_parts(report: Mapping[str, Any]) -> list[str]:
    """Headings, sentences and tables, in the order of a report."""
    checks = report["checks"]
    parts = ["## Which k", *_ks(checks), *_start(checks)]
    parts += ["## At several k", *_at_several_k(checks)]
    parts += ["## Beside GRPO's line", *_line(report)]
    parts += ["## What costs nothing", *_mixture(checks)]
    if checks["dose"]:
        parts += ["## Dose of the guides", *_doses(report)]
    if checks["families"]:
        parts += ["## Whose gain, whose loss", *_families(checks)]
    if checks["registered"]:
        parts += ["## What was registered, after Holm", *_registered(checks, report["k"])]
    return parts


def _cell(result: Mapping[str, float] | None) -> str:
    return NO_VALUE if result is None else cell(result, sign=True)


def _share(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1)


def _ks(checks: Mapping[str, Any]) -> list[str]:
    rows = [["k", "blind guessing", "SFT", "GRPO", "verdict"]] + [
        [
            k,
            NO_VALUE if row["guess"] is None else _share(row["guess"]),
            _share(row["sft"]),
            _share(row["grpo"]),
            "given" if row["usable"] else "none",
        ]
        for k, row in checks["ks"].items()
    ]
    return [
        "pass@k of attempts that never look at the problem, beside the SFT model's. Where guessing "
        f"has {MAX_GUESS_SHARE:.0%} of the SFT model's pass@k or more, no verdict is given. The "
        f"largest k with a verdict is **{checks['k']}**.",
        markdown_table(rows),
    ]


def _start(checks: Mapping[str, Any]) -> list[str]:
    if (start := checks["start"]) is None:
        return []
    rows = [["SFT model", *(f"pass@{k}" for k in start["many"])]]
    rows += [["as published", *map(_share, start["few"].values())]]
    rows += [[f"{start['num_samples']} samples", *map(_share, start["many"].values())]]
    return [
        f"The SFT model was sampled again, {start['num_samples']} times a problem. The first "
        f"samples are those of the records in {start['repeats']} of {start['problems']} problems. "
        "All tables from here on use the larger sample.",
        markdown_table(rows),
    ]


def _headers(checks: Mapping[str, Any], ks: Sequence[str]) -> list[str]:
    return [f"pass@{k}" + ("" if checks["ks"][k]["usable"] else " (guessing)") for k in ks]


def _at_several_k(checks: Mapping[str, Any]) -> list[str]:
    ks = list(checks["ks"])
    parts = []
    for to, title in (("to_sft", "minus the SFT model"), ("to_baseline", "minus GRPO")):
        rows = [["", *_headers(checks, ks)]] + [
            [point, *(_cell(result[k][to]) for k in ks)]
            for point, result in checks["points"].items()
            if to in result[ks[0]]
        ]
        parts += [f"Each point {title}:", markdown_table(rows)]
    return parts


def _line(report: Mapping[str, Any]) -> list[str]:
    checks = report["checks"]
    ks = [k for k in checks["ks"] if k != "1"]
    rows = [["", f"pass@{report['k']}, as published", *_headers(checks, ks)]]
    for point, result in checks["line"].items():
        published = report["points"][point].get("to_line")
        values = [result["why"]] if "why" in result else []
        values += [_cell(result.get(k)) for k in ks[len(values) :]]
        rows.append([point, _cell(published), *values])
    return [
        "pass@k minus that of GRPO's line at the point's pass@1. The published values interpolated "
        "between any two neighbours, also from the largest β to the SFT model, and took the line's "
        "end where pass@1 is higher; their bootstrap counts the noise of a cell three times. The "
        f"corrected ones interpolate between strengths at most a factor {LARGEST_STEP:g} apart, "
        "have no value beyond the line's end, and the interval of every other difference here.",
        markdown_table(rows),
    ]


def _mixture(checks: Mapping[str, Any]) -> list[str]:
    k = str(checks["k"])
    of = [row for row in checks["mixture"]["rows"] if row["k"] == int(k)]
    rows = [[f"of {k} attempts by SFT", "pass@1, first attempt", "pass@1, random attempt"]]
    rows[0] += [f"pass@{k}", "minus GRPO", "minus GRPO's line"]
    first = checks["ks"]["1"]["grpo"]
    rows += [
        [
            str(row["m"]),
            *map(_share, (first, row["random"], row["many"])),
            _cell(row["to_baseline"]),
            _cell(row["to_line"]),
        ]
        for row in of
    ]
    ks = [check for check in checks["ks"] if check != "1"]
    beside = [["", *_headers(checks, ks)]] + [
        [point, *(_cell(result.get(item)) for item in ks)]
        for point, result in checks["mixture"]["beside"].items()
    ]
    return [
        f"Some of the attempts by the SFT model, the others by `{BASELINE}`: with an adapter that "
        "can be switched off both models are at hand, and the first attempt stays GRPO's. Computed "
        "from the counts, nothing is trained.",
        markdown_table(rows),
        "Each point minus these mixtures, at its pass@1 of a random attempt:",
        markdown_table(beside),
    ]


def _doses(report: Mapping[str, Any]) -> list[str]:
    k = report["k"]
    rows = [["point", "tokens touched", "mean q", "Σ log q a completion, nats"]]
    rows[0] += [f"pass@{k} − twin", "the design shows", "this dose could do", "1.4 everywhere"]
    for row in report["checks"]["dose"]:
        total = row.get("log_guide_sum")
        at_most = row.get("log_guide_sum_at_most")
        rows.append(
            [row["point"], f"{row['touched']:.2%}", f"{row['guide_mean']:.5f}"]
            + [f"<= {at_most:.3f}" if total is None else f"{total:+.3f}"]
            + [_cell(row["difference"])]
            + [
                NO_VALUE if value is None else f"{value:.4f}"
                for value in (row["detectable"], row.get("possible"), row.get("possible_at_clip"))
            ]
        )
    off = [row["point"] for row in report["checks"]["dose"] if row["no_verdict"]]
    said = (
        "No verdict on " + ", ".join(f"`{point}`" for point in off) + ": what the guide did could "
        "change less than a tenth of what the design shows."
    )
    return [
        "What each guide did in training, means over seeds and steps, beside what the design shows "
        "four times in five. What a dose could do follows from the slope of the twin's line over "
        "log β, for a guide that multiplies the pull to the reference (Branch).",
        markdown_table(rows),
        *([said] if off else []),
    ]


def _families(checks: Mapping[str, Any]) -> list[str]:
    result = checks["families"]
    ks = list(checks["ks"])
    curves = [["family", "model", *_headers(checks, ks)]] + [
        [family, model, *(_share(curve[family][k]) for k in ks)]
        for family in result["weights"]
        for model, curve in ((SFT, result["curves"][SFT]), ("grpo", result["curves"][BASELINE]))
    ]
    parts = [["GRPO − SFT, part of the mean", "weight", *_headers(checks, ks)]] + [
        [family, _share(result["weights"].get(family, 1.0)), *(f"{part[k]:+.3f}" for k in ks)]
        for family, part in result["parts"].items()
    ]
    return [
        f"pass@k within each family, SFT and `{BASELINE}`; a crossing inside a family is a lower "
        "curve at large k only.",
        markdown_table(curves),
        "What each family adds to the change of the mean:",
        markdown_table(parts),
    ]


def _registered(checks: Mapping[str, Any], k: int) -> list[str]:
    rows = [["point", "claim", "difference", "p", "p after Holm", "holds"]] + [
        [
            row["point"],
            row["claim"],
            _cell(row if "mean" in row else None),
            f"{row['p']:.4f}",
            f"{row['p_holm']:.4f}",
            "yes" if row["holds"] else "no",
        ]
        for row in checks["registered"]
    ]
    return [
        f"The claims of the design at k = {k}: (a) pass@1 at most .03 below GRPO's, (b) pass@{k} "
        f"at most .03 below the SFT model's, (c) pass@{k} above GRPO's, (d) above GRPO's line. p "
        "is two-sided; Holm's correction is over all rows. A claim without a value has p = 1.",
        markdown_table(rows),
    ]


def pilot_parts(report: Mapping[str, Any]) -> list[str]:
    """Of the checks, what a choice of strengths needs."""
    doses = _doses(report) if report["checks"]["dose"] else []
    return [*_line(report), *doses]
