"""Tables follow from code and data, promises name tests, links lead somewhere."""

import functools
import importlib.util
import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from sage_unsloth.study.report import make_report
from sage_unsloth.training.rlvr_config import RlvrConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "data" / "results"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *(ROOT / "docs").rglob("*.md"),
    *RESULTS.rglob("README.md"),
]
spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)
tables.page = functools.cache(tables.page)


def test_tables_are_what_code_and_data_give():
    assert tables.stale() == [], "run python docs/tables.py"


def test_a_stale_table_is_noticed(tmp_path):
    folder = tmp_path / "tables"
    shutil.copytree(tables.TABLES, folder)
    cost = folder / "cost.md"
    cost.write_text(cost.read_text().replace("0.", "1.", 1))
    (folder / "theory.md").unlink()
    (folder / "of-nothing.md").write_text("by hand")
    assert tables.stale(folder) == ["theory", "cost", "of-nothing"]


def test_a_table_shows_a_cell_as_its_result_has_it():
    level = json.loads((RESULTS / "quickstart" / "report.json").read_text())["pass_at_k"]
    grpo = level["family: rare"]["GRPO"]["64"]
    shown = f"{grpo['mean']:.3f} [{grpo['low']:.3f}, {grpo['high']:.3f}]"
    rare = tables.from_quickstart().split("family: rare")[1].split("\n\n")[0]
    assert re.search(rf"^ +GRPO .*{re.escape(shown)}$", rare, re.MULTILINE)


def test_the_readme_samples_its_own_models_as_they_were_trained():
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^python -m sage_unsloth evaluate .*$", text, re.MULTILINE)
    assert command.endswith("--temperature 1") and RlvrConfig.temperature == 1


def test_the_long_runs_found_nothing_wrong():
    kills, soak, versions = (
        json.loads((RESULTS / "reliability" / f"{name}.json").read_text())
        for name in ("kills", "soak", "versions")
    )
    grading = json.loads((RESULTS / "grading" / "evaluation.json").read_text())["grading"]
    assert kills["wrong"] == [] and kills["moments"] >= 50
    assert all(soak["flat"].values()) and soak["steps"] > 4900
    held = [row for row in versions["rows"] if row["outcome"] == "holds"]
    assert all(row["passed"] >= 30 and not row["failed"] for row in held)
    assert not any(row["grades_that_differ_in_that_part"] for row in grading)


@pytest.mark.smoke
def test_every_promise_names_tests_that_exist():
    page = (ROOT / "docs" / "trust.md").read_text()
    tables_of_promises = re.findall(r"^\| promise \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = "".join(tables_of_promises).splitlines()
    assert len(rows) > 20
    for row in rows:
        cell = row.split(" | ")[-1]
        named = re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", cell)
        assert named and named[0][0], row
        assert len(named) == cell.count("`") // 2, row
        file = None
        for path, test in named:
            file = path or file
            assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_what_the_readmes_line_leaves_out_runs_before_a_submission():
    line = re.search(r"<!-- test line -->\n```bash\n(.+)\n```", PAGES[0].read_text())
    assert line and line[1].endswith("-m 'not long'")
    runs = (ROOT / ".ci" / "run").read_text().splitlines()
    assert 'eval "$line"' in runs
    assert any(run.startswith(".venv/bin/python -m pytest ") and " -m long" in run for run in runs)


QUOTED = re.compile(r"([-+]?\.\d{3})\s+\[([-+]?\.\d{3}),\s+([-+]?\.\d{3})\]")


@functools.cache
def reported_intervals():
    """Every estimate with its interval in the reports, without signs: pages say "falls by"."""
    found = set()

    def collect(item):
        if isinstance(item, dict):
            values = [item.get(name) for name in ("mean", "low", "high")]
            if all(isinstance(value, float) for value in values):
                found.add(unsigned(*values))
        for value in item.values() if isinstance(item, dict) else item:
            if isinstance(value, (dict, list)):
                collect(value)

    for path in RESULTS.rglob("report.json"):
        collect(json.loads(path.read_text()))
    for path in (RESULTS / "study").rglob("records.json"):
        collect(json.loads(json.dumps(make_report(json.loads(path.read_text())))))
    return found


def unsigned(mean, low, high):
    low, high = sorted(round(abs(end), 3) for end in (low, high))
    return round(abs(mean), 3), low, high


def quoted_intervals(text):
    for match in QUOTED.finditer(text.replace("−", "-")):
        yield unsigned(*(float(number) for number in match.groups()))


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/findings.md",
        "data/results/frontier/README.md",
        "data/results/frontier/variants/README.md",
        "data/results/quickstart/README.md",
    ],
)
def test_intervals_are_quoted_from_the_reports(page):
    quoted = set(quoted_intervals((ROOT / page).read_text()))
    assert quoted
    assert quoted <= reported_intervals()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            # As GitHub names them: letters, digits and hyphens stay, a space becomes a hyphen.
            names = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in names, target


def test_the_readme_links_every_notebook_and_every_table_is_linked():
    links = [set(re.findall(r"\]\(([^)\s]+)\)", page.read_text())) for page in PAGES]
    notebooks = {f"notebooks/{file.name}" for file in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks and notebooks <= links[0]
    shown = [set(re.findall(r"\{include\} (\S+)", page.read_text())) for page in PAGES]
    linked = {Path(link).name for found in (*links, *shown) for link in found}
    assert {f"{name}.md" for name in tables.SOURCES} <= linked


def test_the_readme_is_short():
    readme = PAGES[0].read_text()
    assert len(readme.splitlines()) <= 200 and len(readme.split()) <= 1600


def test_the_citation_names_the_version_of_the_package():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited and cited[1] == pyproject["project"]["version"]


def test_the_architecture_has_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "sage_unsloth").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` ", page, re.MULTILINE)) == rooms
