"""A benchmark's report as tables: header and rows, each a list of texts."""

from collections.abc import Callable, Mapping
from typing import Any

from sage_unsloth.runs.text import markdown_table as markdown_table

FIGURES = "Drawn beside this report (again by `python -m research.redraw FOLDER`)"


def cell(result: Mapping[str, float], sign: bool = False) -> str:
    """`.487 [.470, .505]`, as the tables have it."""
    numbers = [
        f"{result[name]:+.3f}" if sign else f"{result[name]:.3f}"
        for name in ("mean", "low", "high")
    ]
    mean, low, high = (number.replace("0.", ".", 1) for number in numbers)
    return f"{mean} [{low}, {high}]"


def level_table(report: Mapping[str, Any], name: str, group: str = "all") -> list[list[str]]:
    """Header and rows: pass@k of each algorithm."""
    table = report["pass_at_k"][name][group]
    ks = list(next(iter(table.values())))
    return [["algorithm", *(f"pass@{k}" for k in ks)]] + [
        [algorithm, *(cell(row[k]) for k in ks)] for algorithm, row in table.items()
    ]


def difference_table(
    report: Mapping[str, Any], name: str, keep: Callable[[str], bool], group: str = "all"
) -> list[list[str]]:
    """Header and rows: the paired differences whose name `keep` accepts."""
    table = {pair: row for pair, row in report["differences"][name][group].items() if keep(pair)}
    if not table:
        return []
    ks = list(next(iter(table.values())))
    return [["difference", *(f"pass@{k}" for k in ks)]] + [
        [pair, *(cell(row[k], sign=True) for k in ks)] for pair, row in table.items()
    ]


def claims_table(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [["claim", "in the paper", "here", "difference", "verdict"]]
    for claim in report["claims"]:
        values = f"{claim['value_b']:.3f} → {claim['value_a']:.3f}".replace("0.", ".")
        what = claim["quantity"] + (" out of distribution" if claim["set"] == "ood" else "")
        rows.append(
            [
                claim["text"],
                claim["paper"],
                f"{what}: {values}",
                cell(claim, sign=True),
                claim["verdict"],
            ]
        )
    return rows


def training_table(report: Mapping[str, Any]) -> list[list[str]]:
    """Reward, entropy and gradient norm, early, mid and late (App. B), and what the last third came
    to in the test (Fig. 2).
    """
    header = [
        "algorithm",
        "reward early",
        "mid",
        "late",
        "test pass@1",
        "test pass@n",
        "entropy early",
        "late",
        "gradient norm early",
        "mid",
        "late",
    ]
    rows = [header]
    tests = report["pass_at_k"]["test"]["all"]
    for name, columns in report["training"].items():
        test = [value["mean"] for value in tests[name].values()]
        numbers = [third["mean"] for third in columns["reward"]] + [test[0], test[-1]]
        entropy, norms = columns.get("entropy"), columns.get("grad_norm")
        texts = [f"{number:.3f}" for number in numbers]
        texts += [f"{entropy[at]['mean']:.3f}" if entropy else "–" for at in (0, 2)]
        texts += [f"{norms[at]['mean']:.3f}" if norms else "–" for at in range(3)]
        rows.append([name, *texts])
    return rows


def routes_table(report: Mapping[str, Any]) -> list[list[str]]:
    """How often the rare way is taken, and its share of correct solutions (Eq. 13)."""
    if "rare way" not in next(iter(report["behaviour"].values())):
        return []
    return [["algorithm", "of all completions", "of correct solutions (Eq. 13)"]] + [
        [name, cell(row["rare way"]), cell(row["solutions by the rare way"])]
        for name, row in report["behaviour"].items()
    ]
