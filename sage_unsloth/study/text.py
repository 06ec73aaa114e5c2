"""The report of a study as text: first what each method gains and loses, then the tables."""

from collections.abc import Mapping
from typing import Any

from sage_unsloth.figures import table_text
from sage_unsloth.runs.text import markdown_table
from sage_unsloth.study.chord import LARGEST_STEP
from sage_unsloth.study.free_lines import TITLES
from sage_unsloth.study.points import START
from sage_unsloth.study.verdicts import MATTERS, MAX_GUESS_SHARE

NO_VALUE = "–"


def cell(result: Mapping[str, float] | None, sign: bool = True) -> str:
    """`+.031 [+.011, +.054]`, without an interval if nothing varies."""
    if result is None or "mean" not in result:
        return NO_VALUE
    if result["low"] == result["high"]:
        return _number(result["mean"], sign)
    mean, low, high = (_number(result[name], sign) for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _number(value: float, sign: bool = False) -> str:
    value = round(value, 9)  # where a value lies between two roundings, every CPU takes the same
    return (f"{value:+.3f}" if sign else f"{value:.3f}").replace("0.", ".", 1)


def conditions(report: Mapping[str, Any]) -> str:
    """One sentence about how the numbers were measured."""
    seeds, environment = report["seeds"], report["environment"]
    rlvr, packages = report["settings"]["rlvr"], environment["packages"]
    code = environment["commit"] or environment["code_tree"]
    return (
        f"{report['title']}; {len(seeds)} training seed{'s' * (len(seeds) > 1)} "
        f"({', '.join(map(str, seeds))}) of each point, {rlvr['max_steps']} steps of "
        f"{rlvr['prompts_per_step']} x {rlvr['num_generations']} completions; sampled at T = "
        f"{report['settings']['sampling']['temperature']:g}; sage_unsloth "
        f"{packages['sage_unsloth']} ({code[:12]}), unsloth {packages['unsloth']}, torch "
        f"{packages['torch']}, {environment['date'][:10]}"
    )


def answer_lines(report: Mapping[str, Any]) -> list[str]:
    """What each method gains and loses on the first benchmark, one paragraph each."""
    name, item = next(iter(report["sets"].items()))
    baseline, k = report["baseline"], str(item["k"])
    usable = item["ks"][k]["usable"]
    lines = [
        f"On {name}, {item['num_problems']} problems; "
        + (
            f"k = {k} is the largest that blind guessing cannot reach."
            if usable
            else "blind guessing reaches every k."
        )
    ]
    for point, row in item["points"].items():
        if point == START:
            continue
        parts = [f"**`{point}`**", _against("the start model", row, "to_start", k)]
        if point != baseline:
            parts.append(_against(f"`{baseline}`", row, "to_baseline", k))
            beside = row["to_lines"].get(k)
            if beside and "line" in beside:
                parts.append(
                    f"Compared with what needs no other method ({TITLES[beside['line']]}, the "
                    f"highest line at its pass@1): pass@{k} {cell(beside)} "
                    f"({row['verdicts'][f'to_lines@{k}']})"
                )
            elif beside:
                parts.append(f"Compared with what needs no other method: {beside['why']}")
        lines.append(". ".join(parts) + ".")
    return lines


def _against(name: str, row: Mapping[str, Any], to: str, k: str) -> str:
    ks = list(dict.fromkeys(("1", k)))
    texts = [f"pass@{at} {cell(row[to][at])} ({row['verdicts'][f'{to}@{at}']})" for at in ks]
    return f"Against {name}: " + ", ".join(texts)


def claim_lines(report: Mapping[str, Any]) -> list[str]:
    """The registered comparisons that survive, and the number of other differences."""
    claims = report["claims"]
    others = (
        f"{report['comparisons']} differences have a 95 % interval here; each by itself misses the "
        "true value in one of twenty cases."
    )
    if not claims:
        return [f"No claim was named (`--claims`), so no difference is confirmed. {others}"]
    which = ", ".join(f"`{row['claim']}`" for row in claims if row["holds"]) or "none"
    late = [row["claim"] for row in claims if row["runs_complete"]]
    texts = [f"Of {len(claims)} claims, these hold after Holm's correction: {which}. {others}"]
    if late:
        texts.append(f"Named only after runs were complete: {', '.join(late)}.")
    return texts


def report_markdown(report: Mapping[str, Any]) -> str:
    """`report.md`."""
    seeds = "training seeds and problems" if len(report["seeds"]) > 1 else "problems only"
    parts = [
        f"# Study: {report['title']}",
        "\n\n".join(answer_lines(report)),
        "\n\n".join(claim_lines(report)),
        "![frontier](frontier.png)",
        f"{conditions(report)}.",
        f"[ ]: 95 % interval over {seeds}; differences are paired by both. The start model was not "
        "trained, so its interval is over problems only. A mean without an interval is of equal "
        "counts, which do not show how much a problem could differ. An interval that holds 0 and "
        f"ends within {MATTERS:g} of it is called equal.",
    ]
    if report["claims"]:
        name = next(iter(report["sets"]))
        parts += [
            f"## Named comparisons on {name}, after Holm",
            markdown_table(claims_table(report)),
        ]
    for name, item in report["sets"].items():
        parts += [f"## {name}", *_set_parts(report, item)]
    if report["dose"]:
        parts += ["## Dose of the guides", *_dose_parts(report)]
    return "\n\n".join(parts) + "\n"


def claims_table(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [["claim", "difference", "p", "p after Holm", "holds"]]
    for row in report["claims"]:
        holds = row["why"] or ("yes" if row["holds"] else "no")
        numbers = [f"{row[name]:.4f}" for name in ("p", "p_holm")]
        rows.append([row["claim"], cell(row), *numbers, holds])
    return rows


def level_table(item: Mapping[str, Any]) -> list[list[str]]:
    return [["", *_headers(item)]] + [
        [point, *(cell(result, sign=False) for result in row["level"].values())]
        for point, row in item["points"].items()
    ]


def difference_table(item: Mapping[str, Any], to: str) -> list[list[str]]:
    return [["", *_headers(item)]] + [
        [point, *(cell(result) for result in row[to].values())]
        for point, row in item["points"].items()
        if row[to]
    ]


def _headers(item: Mapping[str, Any]) -> list[str]:
    return [f"pass@{k}" + ("" if row["usable"] else " (guessing)") for k, row in item["ks"].items()]


def _set_parts(report: Mapping[str, Any], item: Mapping[str, Any]) -> list[str]:
    samples = item["num_samples"]
    parts = [
        f"{item['num_problems']} problems"
        + (f" in {item['num_units']} units" if item["num_units"] != item["num_problems"] else "")
        + f", {samples[report['baseline']]} samples of each, {samples[START]} for the start model.",
        markdown_table(level_table(item)),
        "Minus the start model:",
        markdown_table(difference_table(item, "to_start")),
    ]
    if len(item["points"]) > 2:
        parts += [
            f"Minus `{report['baseline']}`:",
            markdown_table(difference_table(item, "to_baseline")),
            *_line_parts(item),
        ]
    parts += _guess_parts(item)
    if item["groups"] is not None:
        parts += _group_parts(item)
    if item["detectable"] and any(item["detectable"].values()):
        result = ", ".join(f"pass@{k} {value:.3f}" for k, value in item["detectable"].items())
        parts.append(
            f"True differences from the baseline that this design detects 4 times in 5: {result}."
        )
    return parts


def _line_parts(item: Mapping[str, Any]) -> list[str]:
    ks = [k for k in item["ks"] if k != "1"]
    rows = [["", "highest line", *_headers(item)[1:]]]
    for point, row in item["points"].items():
        if not row["to_lines"]:
            continue
        names = dict.fromkeys(row["to_lines"][k].get("line", "none has its pass@1") for k in ks)
        rows.append([point, ", ".join(names), *(cell(row["to_lines"][k]) for k in ks)])
    return [
        "Minus the highest of the lines that need no other method, at the point's own pass@1: "
        + ", ".join(f"{name} ({TITLES[name]})" for name in item["lines"])
        + f". Lines are interpolated between neighbours at most a factor {LARGEST_STEP:g} apart "
        "and have no value beyond their ends.",
        markdown_table(rows),
        *(
            f"No line of {TITLES[name]} yet, because not every seed has been sampled for it."
            for name in item["lines_to_come"]
        ),
    ]


def _guess_parts(item: Mapping[str, Any]) -> list[str]:
    if all(row["guess"] is None for row in item["ks"].values()):
        return []
    rows = [["k", "blind guessing", START, "baseline", "verdict"]] + [
        [
            k,
            *(_number(row[name]) for name in ("guess", START, "baseline")),
            "given" if row["usable"] else "none",
        ]
        for k, row in item["ks"].items()
    ]
    return [
        "pass@k of guesses that never look at the problem. If they reach "
        f"{MAX_GUESS_SHARE:.0%} of the start model's pass@k, that k gets no verdict.",
        markdown_table(rows),
    ]


def _group_parts(item: Mapping[str, Any]) -> list[str]:
    result, k = item["groups"], str(item["k"])
    names = list(result["weights"])
    cells = [["pass@1; pass@" + k, *names]]
    cells += [
        [point, *(f"{_number(curve[n]['1'])}; {_number(curve[n][k])}" for n in names)]
        for point, curve in result["curves"].items()
    ]
    adds = [[f"adds to the change of pass@1; pass@{k}", *names]]
    adds += [
        [point, *(f"{_number(part[n]['1'], True)}; {_number(part[n][k], True)}" for n in names)]
        for point, part in result["parts"].items()
    ]
    return ["By group of problems:", markdown_table(cells), markdown_table(adds)]


def _dose_parts(report: Mapping[str, Any]) -> list[str]:
    rows = [["point", "tokens touched", "mean q", "Σ log q a completion", "could change"]]
    rows[0] += ["Σ log q, correct", "Σ log q, wrong"]
    for row in report["dose"]:
        total, at_most = row.get("log_guide_sum"), row.get("log_guide_sum_at_most", 0.0)
        rows.append(
            [
                row["point"],
                f"{row['touched']:.2%}",
                f"{row['guide_mean']:.5f}",
                f"<= {at_most:.3f}" if total is None else f"{total:+.3f}",
                NO_VALUE if row.get("possible") is None else f"{row['possible']:+.4f}",
                *(
                    NO_VALUE if row[name] is None else f"{row[name]:+.3f}"
                    for name in ("correct", "wrong")
                ),
            ]
        )
    pays = [
        f"`{row['point']}`"
        for row in report["dose"]
        if None not in (row["correct"], row["wrong"]) and row["wrong"] > row["correct"]
    ]
    off = [f"`{row['point']}`" for row in report["dose"] if row["no_verdict"]]
    return [
        "How each guide acted in training, as means over seeds and steps. How much it could change "
        "follows from the slope of the same method's line over β without the guide. The last two "
        "columns are for completions of the start model, before training. Σ log q is in nats.",
        markdown_table(rows),
        *([f"Favoured wrong completions over correct ones: {', '.join(pays)}."] if pays else []),
        *([f"No verdict on {', '.join(off)}: the guide did almost nothing."] if off else []),
    ]


def summary(report: Mapping[str, Any]) -> str:
    """The answer and the levels, for the terminal."""
    texts = [line.replace("**", "").replace("`", "") for line in answer_lines(report)]
    texts += [line.replace("`", "") for line in claim_lines(report)]
    item = next(iter(report["sets"].values()))
    rows = level_table(item)
    rows[0][0] = "model"
    table = table_text([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
    return "\n".join([*texts, "", table])
