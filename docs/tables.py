"""Writes the tables of `docs/tables/`, which the pages of `docs/` link to or include.

    python docs/tables.py            # write all of them anew
    python docs/tables.py --check    # fail where a file is not what code and data give today

A table follows from the code (algorithms, theory, what fits) or from a committed result in
`data/results/`. No file is edited by hand.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

from research import gpu_lines, memory_count, mutation
from research.cost import report as cost_report
from research.theory import advantage_sizes
from research.theory.optima import guided_optimum, per_token_optimum
from research.theory.support import own_guide_optimum, tree_example
from research.theory.trees import edge_guide, guide_table
from research.variants.report import fork_table, level_table, start_table
from sage_unsloth import quickstart
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.planning.plan import what_fits
from sage_unsloth.runs import settings
from sage_unsloth.selftest import report as gpu_report
from sage_unsloth.training import algorithms
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_config import SftConfig

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "docs" / "tables"
RESULTS = Path("data", "results")
STAGES = {"train": RlvrConfig, "sft": SftConfig}
NOTE = "<!-- Generated: python docs/tables.py -->"


def from_algorithms() -> str:
    """What each algorithm changes against plain GRPO."""
    return algorithms.algorithm_table()


def from_settings(command: str) -> str:
    """Settings of a command."""
    return settings.settings_tables(STAGES[command])


def from_advantages() -> str:
    """Groups that teach nothing under each rule, and the size of its advantages."""
    rows = advantage_sizes.table()
    return markdown(list(rows[0]), (row.values() for row in rows))


def from_plan() -> str:
    """Model by card: what is needed, and the settings that fit."""
    rows = what_fits()
    return markdown(list(rows[0]), (row.values() for row in rows))


def from_theory() -> str:
    """Where each objective, and each loss, comes to rest on the tree of Theorem 4.3."""
    case, tree, reference = tree_example()
    log_guide = edge_guide(tree, guide_table(tree, BranchGuide(), reference, reference), reference)
    log_guide = log_guide.log()

    def optimum(guide=None) -> float:
        return guided_optimum(case.ref_logps, case.rewards, case.beta, guide)[case.index]

    def rest(kl: str, guide=None) -> float:
        policy = per_token_optimum(tree, reference, case.beta, log_guide=guide, kl=kl)
        return tree.completion_logps(policy).exp()[case.index]

    values = {
        "reference": [case.ref_logps[case.index].exp()],
        "Eq. 2, the optimum without a guide": [optimum()],
        "Eq. 4, the optimum with Branch": [optimum(case.log_guide)],
        "where GRPO's loss (k3) rests; with Branch": [rest("forward"), rest("forward", log_guide)],
        "where `k3-is` rests; with Branch": [rest("reverse"), rest("reverse", log_guide)],
        # By enumeration in tests/objective/test_sequence_credit.py: it is Eq. 4.
        "where `k3-is` with Branch and credit for later tokens rests": [optimum(case.log_guide)],
        "Eq. 4, if the guide is that of its own policy": [
            own_guide_optimum(tree, reference, case.beta, BranchGuide())[0][case.index]
        ],
    }
    rows = ([name, "; ".join(map(share, found))] for name, found in values.items())
    return markdown(["", "π(y\\*)"], rows)


def share(value: float) -> str:
    return f"{float(value):.5f}"[1:]


def from_quickstart() -> str:
    """pass@k, differences and ways of working of the committed quickstart."""
    return f"```\n{quickstart.family_tables(read('quickstart', 'report.json'))}\n```"


def from_rows() -> str:
    """Variants of the arithmetic task: training rows, fork dialects, SFT models."""
    report = read("frontier", "variants", "report.json")
    tables = level_table(report["rows"]), fork_table(report), start_table(report["sft models"])
    return "\n\n".join("\n".join(lines) for lines in tables)


def from_cost() -> str:
    """What a guide costs against plain GRPO."""
    reports = [read("bench", f"unsloth-2026.10.{n}", "bench.json") for n in (7, 9)]
    table = cost_report.markdown(cost_report.versions_table(reports))
    return f"{cost_report.conditions(reports[0])}\n\n{table}"


def from_grading() -> str:
    """Seconds to grade made-up answers, ours against math-verify alone."""
    result = read("grading", "evaluation.json")
    rows = (
        [
            row["order"],
            str(row["distinct_per_problem"]),
            f"{row['completions']:,}",
            f"{row['ours_seconds']:.1f}",
            f"{row['baseline_seconds']:.0f}",
            f"{row['ratio']:.1f}",
            str(row["grades_that_differ_in_that_part"]),
        ]
        for row in result["grading"]
    )
    header = ["answers come", "different answers to a problem", "answers", "ours, s"]
    header += ["`verify(parse, parse)`, s", "times as long", "grades that differ"]
    lines = ["Seconds of CPU, the workers' included; the baseline is extrapolated from a part."]
    listed = (ROOT / "data" / "adversarial_answers.jsonl").read_text().splitlines()
    lines.append(f"Answers made to fool or stop a grader, each with its grade: {len(listed)}.")
    return "\n\n".join([markdown(header, rows), *lines])


def from_precision() -> str:
    """How far number formats move a model."""
    result = read("precision", "precision.json")
    rows = ([row["models"], f"{row['kl']:.1e}"] for row in result["pairs"])
    note = (
        f"The embedded model, fine-tuned in 4 bits by its own settings. {result['rows_read']} rows "
        "that it was not trained on are read; the mean is over the tokens of their solutions, on a "
        "CPU. What training changed, the fourth row, is the yardstick."
    )
    return f"{markdown(['two models', 'KL(first ‖ second), nats a token'], rows)}\n\n{note}"


def from_coverage() -> str:
    """How often intervals of pass@k hold the truth, ours beside the bootstrap."""
    result = read("coverage", "coverage.json")
    cases: dict[tuple[str, str, int], dict[int, dict]] = {}
    for row in result["rows"]:
        cases.setdefault((row["of"], row["shape"], row["k"]), {})[row["problems"]] = row
    sizes = sorted({row["problems"] for row in result["rows"]})
    rows = (
        [of, shape, str(k), *(cell(by_size[size]) if size in by_size else "" for size in sizes)]
        for (of, shape, k), by_size in cases.items()
    )
    note = (
        f"{result['evaluations']:,} evaluations of each case, 256 samples a problem. In a cell: "
        "how many in 100 of our intervals hold the truth, how many of the percentile bootstrap's, "
        "and how many times as wide ours are on average."
    )
    header = ["of", "problems", "k", *(f"{size} problems" for size in sizes)]
    return f"{note}\n\n{markdown(header, rows)}"


def cell(row: dict) -> str:
    """A simulated case of `from_coverage`."""
    shares = f"{100 * row['holds']:.0f}; {100 * row['bootstrap_holds']:.0f}"
    width = row["bootstrap_width"]
    return f"{shares}; {row['width'] / width:.2g} ×" if width else f"{shares}; –"


def from_red_team() -> str:
    """What the grader accepts and refuses on real golds, by class."""
    result = read("grading", "red_team.json")
    total = result["total"]

    def share(count: dict, failures: str, of: str) -> str:
        return f"{count.get(failures, 0):,} of {count[of]:,}" if count.get(of) else ""

    rows = [
        [family, share(count, "false_accepts", "wrong"), share(count, "false_rejects", "right")]
        for family, count in (*total["classes"].items(), ("**all**", total))
    ]
    golds = {name: r["golds_tried"] for name, r in result["benchmarks"].items()}
    note = (
        f"{result['checker']}; at most {result['per_shape']} golds of each shape and benchmark: "
        + ", ".join(f"{name} {n}" for name, n in golds.items())
        + ". Wrong writings and keys that are right for several golds: "
        f"{total['right_for_several']}. Golds that are not right for themselves: "
        f"{total['golds_not_their_own']}."
    )
    return "\n\n".join([markdown(["class", "wrong, accepted", "right, refused"], rows), note])


def from_reliability() -> str:
    """What was run once and is too long for a test."""
    kills, soak, fuzz = (read("reliability", f"{name}.json") for name in ("kills", "soak", "fuzz"))
    starts = sum(life["starts"] for life in kills["lives"])
    growth = {
        name: "{:+.2f} [{:+.2f}, {:+.2f}]".format(*soak["series"][name]["per_1000_steps"])
        for name in ("rss", "rss_children")
    }
    cpu, memory = soak["series"]["cpu_per_step"], [*fuzz["parent_peak_mib"].values()]
    late = fuzz["grades"]["timed out"]
    rows = [
        [
            "SIGKILL, SIGTERM or SIGINT at random moments",
            f"{kills['moments']} moments of {len(kills['lives'])} runs ({starts} starts) of "
            + ", ".join(f"`{name}`" for name in kills["commands"]),
            f"{len(kills['wrong'])} differ from a run that was left alone",
        ],
        [
            "a long run",
            f"{soak['steps']:,.0f} steps",
            f"resident memory {growth['rss']} MiB in 1,000 steps, of the graders "
            f"{growth['rss_children']}; CPU time of a step {cpu['first_tenth']:.2f} s in the first "
            f"tenth, {cpu['last_tenth']:.2f} s in the last; level: "
            + ", ".join(name for name, flat in soak["flat"].items() if flat),
        ],
        [
            "fuzzed answers",
            f"{fuzz['answers']:,}",
            f"{fuzz['answers'] - late:,} graded, {late} ended at the limit of "
            f"{fuzz['time_limit_seconds']:g} s (the slowest took "
            f"{fuzz['slowest'][0]['seconds']:.0f} s), the caller's memory "
            f"{memory[0]:.0f} → {memory[1]:.0f} MiB",
        ],
    ]
    return markdown(["what", "how much", "found"], rows)


def from_versions() -> str:
    """What `tests/version_matrix.py` found of other versions."""
    matrix = read("reliability", "versions.json")
    header = ["row", *PACKAGES, "found", "requirements that pip would not meet"]
    rows = []
    for row in matrix["rows"]:
        beside = dict(release.split("==") for release in row["beside"])
        versions = [row["versions"].get(name, "") for name in PACKAGES]
        passed = f", {row['passed']} tests pass" if row["passed"] else ""
        said = f": {row['message'].partition('. Try')[0][:200]}" if row["message"] else ""
        name = row["name"] + (f" ({beside['vllm']})" if "vllm" in beside else "")
        not_met = sorted({bound for text in row.get("not_met", []) for bound in broken(text, row)})
        cell = ", ".join(f"`{bound}`" for bound in not_met)
        rows.append([name, *versions, f"{row['outcome']}{passed}{said}", cell])
    date = matrix["environment"]["date"][:10]
    return f"{markdown(header, rows)}\n\nLast tried on {date}; other rows are from earlier days."


def broken(requirement: str, row: dict) -> list[str]:
    """The bounds of a requirement that the row's versions are outside of."""
    wanted = Requirement(requirement)
    here = row["versions"].get(wanted.name)
    return [f"{wanted.name}{s}" for s in wanted.specifier if here is None or not s.contains(here)]


PACKAGES = ("unsloth", "trl", "transformers", "peft", "torch")


def from_pythons() -> str:
    """The patch on other versions of Python and PyTorch."""
    header = ["", "Python", "torch", "unsloth", "found"]
    return markdown(
        header,
        (
            [
                row["name"],
                row["python"],
                row["versions"]["torch"].split("+")[0],
                row["versions"]["unsloth"],
                f"{row['outcome']}, {row['passed']} tests pass",
            ]
            for row in read("reliability", "pythons.json")["rows"]
        ),
    )


def from_mutation() -> str:
    """How many of a room's mutants its tests notice."""
    rows = []
    for file in sorted((ROOT / RESULTS / "reliability" / "mutation").glob("*.json")):
        result = read("reliability", "mutation", file.name)
        counted, before, now = mutation.score(result)
        tried = f"{result['tried']} of {result['mutants']}"
        share = f"{now / counted:.0%}"
        rows.append([f"`{result['room']}`", tried, str(counted), str(before), str(now), share])
    header = ["room", "tried", "another program", "noticed at first", "noticed now", "share"]
    return markdown(header, rows)


def from_hosted() -> str:
    """Which packages of Colab's image are replaced, by its card."""
    rows = read("hosted", "colab.json")["machines"]
    cells = [
        [
            row["machine"],
            ", ".join(kept.replace("==", " ") for kept in row["kept"]),
            ", ".join(f"{name} {old} → {new}" for name, (old, new) in row["replaced"].items()),
            str(len(row["added"])),
        ]
        for row in rows
    ]
    return markdown(["card", "kept on purpose", "replaced", "added"], cells)


def from_selftest() -> str:
    """What `doctor --deep` found on a CPU, and how long each row took."""
    report = read("selftest", "cpu.json")
    rows = []
    for row in report["findings"]:
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
        rows.append([row["name"], row["status"], seconds, row["found"]])
    table, device = markdown(["row", "", "seconds", "found"], rows), report["machine"]["device"]
    note = "while other work kept it busy. A check's imports are in the seconds of its first row."
    return f"{table}\n\n{device}, {note}"


def from_gpus(folder: Path = ROOT / RESULTS / "gpu") -> str:
    """What `doctor --deep` measured on each GPU that was reported."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return "No report of a GPU is in the repository yet, so nothing is measured on one."
    reports = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return markdown(gpu_report.GPU_COLUMNS, map(gpu_report.gpu_row, reports))


def from_gpu_lines() -> str:
    """Branches that only a GPU reaches, and what runs them there."""
    counts = read("coverage", "gpu_lines.json")
    rest = counts["never_ran_and_not_listed"]
    largest = sorted(counts["open"].items(), key=lambda item: len(item[1]), reverse=True)[:4]
    note = (
        f"Of {counts['statements']:,} statements of the package {counts['ran']:,} ran in the "
        f"README's test line on a CPU ({counts['environment']['date'][:10]}). "
        f"{counts['never_ran_and_listed']} others stand behind a condition of this table. {rest:,} "
        "do not: most are of the tests marked `long`, of `doctor --deep`, or of processes without "
        "an environment, which coverage cannot see. The files with most of them: "
        + ", ".join(f"`{file}` ({len(lines)})" for file, lines in largest)
        + f". Both sides of {len(counts['both_ran'])} conditions ran: a test makes them true there."
    )
    return f"{markdown(*gpu_lines.table())}\n\n{note}"


def from_memory_count() -> str:
    """Live bytes of one training step, counted on fake tensors, beside the plan's."""
    return memory_count.markdown_table(read("memory", "count.json")["rows"])


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(*parts: str) -> dict:
    return json.loads(ROOT.joinpath(RESULTS, *parts).read_text(encoding="utf-8"))


SOURCES: dict[str, Callable[[], str]] = {
    "algorithms": from_algorithms,
    "advantages": from_advantages,
    "plan": from_plan,
    "theory": from_theory,
    "quickstart": from_quickstart,
    "rows": from_rows,
    "cost": from_cost,
    "grading-speed": from_grading,
    "precision": from_precision,
    "coverage": from_coverage,
    "red-team": from_red_team,
    "reliability": from_reliability,
    "versions": from_versions,
    "mutation": from_mutation,
    "python": from_pythons,
    "hosted": from_hosted,
    "selftest": from_selftest,
    "settings-train": partial(from_settings, "train"),
    "settings-sft": partial(from_settings, "sft"),
    "gpus": from_gpus,
    "gpu-lines": from_gpu_lines,
    "memory-count": from_memory_count,
}


def page(name: str) -> str:
    """A table as a page: its title is the first sentence of the docstring that makes it."""
    table = SOURCES[name]
    arguments = table.args if isinstance(table, partial) else ()
    made_by = table.func if isinstance(table, partial) else table
    sentence = re.split(r"\.\s", inspect.cleandoc(made_by.__doc__ or name) + "\n")[0]
    title = ": ".join([" ".join(sentence.split()), *arguments])
    # A page that includes the table begins at its fifth line.
    return f"{NOTE}\n\n# {title}\n\n{table()}\n"


def stale(folder: Path = TABLES) -> list[str]:
    """Names of the tables whose file is not what code and data give today; files that no table
    belongs to.
    """
    found = [
        name
        for name in SOURCES
        if not (file := folder / f"{name}.md").exists()
        or file.read_text(encoding="utf-8") != page(name)
    ]
    return found + sorted(file.stem for file in folder.glob("*.md") if file.stem not in SOURCES)


def write(folder: Path = TABLES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        (folder / f"{name}.md").write_text(page(name), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write()
        return 0
    if found := stale():
        print(
            f"not what code and data give, run python docs/tables.py: {', '.join(found)}",
            file=sys.stderr,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
