"""A comparison as one self-contained HTML file, `comparison.html`.

pass@k curves, paired differences, problems that only one model solves, and sample completions. The
page is bounded: in cases of each benchmark, characters of each completion, and names in a list.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sage_unsloth.evaluation.figures import draw_differences, draw_pass_at_k, svg
from sage_unsloth.evaluation.record_tables import RecordSet, in_order
from sage_unsloth.evaluation.report_text import interval_text, partial_line
from sage_unsloth.figures import line_styles
from sage_unsloth.runs.html import escape, page

CASES = 8  # of each benchmark
ALONE = 2  # of them of each model, problems that it alone solves
CASE_MODELS = 6  # whose completions are in a case
TEXT = 3_000  # characters of a text that are shown
MAX_NAMES = 200  # names of problems in a list

COMPARISON_STYLE = """
@media (max-width: 32rem) { body { padding: .7rem; } section { padding: .7rem; } }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr));
  gap: 1rem; } .panels > div { min-width: 0; } svg { width: 100%; height: auto; }
.legend { display: flex; gap: .2rem 1rem; flex-wrap: wrap; font-size: .85rem; }
@media (prefers-color-scheme: dark) { svg, .legend b { filter: invert(1) hue-rotate(180deg); } }
th, td { white-space: nowrap; padding: .3rem .5rem; } small { color: var(--faint); }
details { border-top: 1px solid var(--line); padding: .4rem 0; } summary { cursor: pointer; }
pre { font: 14px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--page); border: 1px solid var(--line); border-radius: 4px; padding: .6rem;
  max-height: 24rem; overflow: auto; margin: .3rem 0 .8rem; unicode-bidi: isolate; }
h4 { font-size: .9rem; margin: .6rem 0 .2rem; } .right { color: #009e73; } .wrong { color:
  #d55e00; }
"""


def comparison_page(
    result: Mapping[str, Any],
    by_benchmark: Mapping[str, Mapping[str, Sequence[RecordSet]]],
    note: str,
) -> str:
    """The page.

    Args:
        result: the content of `report.json`.
        by_benchmark: benchmark -> model -> its record sets, one per training seed; the first gives
            the counts and completions of the cases.
        note: what the bands are, and the temperature.
    """
    models = list(dict.fromkeys(row["model"] for row in result["table"]))
    title = f"pass@k: {', '.join(models)}"
    reading = f"[ ] and {note}; differences are paired by problem"
    body = [f"<h1>{escape(title)}</h1>", f'<p class="note">{escape(reading)}</p>']
    for benchmark, curves in result["pass_at_k"].items():
        rows = {row["model"]: row for row in result["table"] if row["benchmark"] == benchmark}
        sets = {name: seeds[0] for name, seeds in by_benchmark[benchmark].items()}
        problems = next(iter(rows.values()))["problems"]
        body += [
            f"<section><h2>{escape(benchmark)} ({problems} problems)</h2>",
            _graphs(curves, result["differences"][benchmark]),
            _curve_table(curves, rows),
            _difference_table(result["differences"][benchmark]),
            *(
                f'<p class="note">{escape(partial_line(name, part))}</p>'
                for name, part in result.get("partial", {}).items()
                if name == benchmark
            ),
            _alone(result["coverage"][benchmark]),
            _cases(sets, result["coverage"][benchmark]["only"]),
            "</section>",
        ]
    return page(title, body, COMPARISON_STYLE)


def _graphs(curves: Mapping[str, Any], differences: Mapping[str, Any]) -> str:
    panels = [svg(draw_pass_at_k, curves) + _legend(list(curves), 0)]
    if differences:
        panels.append(svg(draw_differences, differences) + _legend(list(differences), 1))
    return '<div class="panels">' + "".join(f"<div>{panel}</div>" for panel in panels) + "</div>"


def _legend(names: Sequence[str], first: int) -> str:
    """The curves' names with their colours; `first` is the number of the first one."""
    styles = line_styles(names, first)
    items = (
        f'<span><b style="color: {styles[name]["color"]}">■</b> {escape(name)}</span>'
        for name in names
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _curve_table(curves: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> str:
    ks = sorted({int(k) for curve in curves.values() for k in curve})
    cells = [
        [name, str(rows[name]["samples"]), str(rows[name]["seeds"])]
        + [interval_text(curve.get(str(k))) for k in ks]
        for name, curve in curves.items()
    ]
    header = ["model", "samples", "seeds", *(f"pass@{k}" for k in ks)]
    return f"<h3>pass@k</h3>{_table(header, cells)}"


def _difference_table(differences: Mapping[str, Any]) -> str:
    if not differences:
        return ""
    ks = sorted({int(k) for curve in differences.values() for k in curve})
    cells = [
        [pair] + [interval_text(curve.get(str(k)), "+") for k in ks]
        for pair, curve in differences.items()
    ]
    header = ["difference", *(f"pass@{k}" for k in ks)]
    return f"<h3>differences</h3>{_table(header, cells)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ("".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    """A text; an interval goes on the next line, to save width."""
    value, bracket, interval = text.partition(" [")
    if not (bracket and interval.endswith("]")):
        return escape(text)
    return f"{escape(value)}<br><small>[{escape(interval)}</small>"


def _alone(coverage: Mapping[str, Any]) -> str:
    """Problems that only one model solves."""
    if len(coverage["solved"]) < 2:
        return ""
    parts = [f"<h3>solved by one model alone, in {coverage['samples']} samples</h3>"]
    for name, problems in coverage["only"].items():
        rest = f" … and {len(problems) - MAX_NAMES} more" if len(problems) > MAX_NAMES else ""
        shown = ", ".join(problems[:MAX_NAMES]) + rest
        parts.append(
            f"<details><summary>{escape(name)}: {len(problems)} alone, of "
            f"{coverage['solved'][name]} that it solves</summary>{escape(shown) or 'none'}"
            "</details>"
        )
    return "".join(parts)


def choose_cases(sets: Mapping[str, RecordSet], only: Mapping[str, Sequence[str]]) -> list[str]:
    """Problems whose completions are worth reading, chosen by rule.

    For each model the first `ALONE` that only it solves; then those with the largest difference in
    the shares of correct samples; `CASES` at most.

    Args:
        sets: model -> record set, of the same problems.
        only: model -> problems that only it solves.
    """
    chosen = [problem for problems in only.values() for problem in problems[:ALONE]]
    problems = next(iter(sets.values())).problems
    shares_MP = np.stack([in_order(item, problems).mean(axis=1) for item in sets.values()])
    # Of one model, the problems that it solves about half the time.
    spread = np.ptp(shares_MP, axis=0) if len(sets) > 1 else -np.abs(shares_MP[0] - 0.5)
    chosen += [problems[place] for place in np.argsort(-spread, kind="stable")]
    return list(dict.fromkeys(chosen))[:CASES]


def _cases(sets: Mapping[str, RecordSet], only: Mapping[str, Sequence[str]]) -> str:
    if not any(item.examples for item in sets.values()):
        return ""
    shown = dict(list(sets.items())[:CASE_MODELS])
    chosen = "those that the model solves nearest to half the time"
    if len(sets) > 1:
        chosen = (
            f"the first {ALONE} problems that each model alone solves, then those where the "
            "models' shares of correct samples differ most"
        )
    rule = (
        f"Chosen by rule: {chosen}. Of each model, the first correct and the first wrong "
        f"completion, at most {TEXT:,} characters of each."
    )
    parts = [f'<h3>completions to read</h3><p class="note">{rule}</p>']
    for problem in choose_cases(sets, only if len(sets) > 1 else {}):
        texts = (item.texts[problem] for item in sets.values() if problem in item.texts)
        golds = (item.golds[problem] for item in sets.values() if problem in item.golds)
        counts = "; ".join(
            f"{name} {correct.sum()} of {correct.size}"
            for name, item in shown.items()
            for correct in (item.correct[item.problems.index(problem)],)
        )
        parts.append(
            f"<details><summary>{escape(problem)}: {escape(counts)} correct</summary>"
            f"<pre>{_cut(next(texts, ''))}</pre>"
            f"<p>right: {_cut(next(golds, ''))}</p>"
            + "".join(_completions(name, item, problem) for name, item in shown.items())
            + "</details>"
        )
    return "".join(parts).replace("<pre></pre>", "")


def _completions(name: str, item: RecordSet, problem: str) -> str:
    result = item.examples.get(problem, {})
    return "".join(
        f'<h4>{escape(name)}, sample {result[kind]["sample"]}: <span class="{mark}">{kind}</span>'
        f"</h4><pre>{_cut(result[kind]['completion'], result[kind]['left_out'])}</pre>"
        for kind, mark in (("correct", "right"), ("wrong", "wrong"))
        if kind in result
    )


def _cut(text: str, left_out: int = 0) -> str:
    """The escaped text, at most `TEXT` characters, and how many more there were."""
    rest = max(0, len(text) - TEXT) + left_out
    return escape(text[:TEXT]) + (f"<em> … {rest:,} characters more</em>" if rest else "")
