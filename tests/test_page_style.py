"""How the pages read: short sentences, an answer first, then a block that runs."""

import re
from pathlib import Path
from statistics import mean

import pytest

from sage_unsloth.training.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PROSE = [page for page in PAGES if len(page.read_text().split()) > 100]
REFERENCE = {"architecture", "glossary", "index", "README", "CONTRIBUTING"}


def name(page: Path) -> str:
    return page.stem


def prose(page: Path) -> list[str]:
    """The paragraphs and list items of a page, without code, tables, pictures and headings."""
    text = re.sub(
        r"^```.*?^```|^\$\$.*?^\$\$|<!--.*?-->", "\n", page.read_text(), flags=re.S | re.M
    )
    paragraphs, lines = [], []
    for line in [*text.splitlines(), ""]:
        item = re.match(r" *([-*]|\d+\.) ", line)
        if not line.strip() or item or re.match(r" *(#|\||!?\[!|!\[|\$\$)", line):
            paragraphs.append(" ".join(lines))
            lines = []
        if line.strip() and not re.match(r" *(#|\||!?\[!|!\[|\$\$)", line):
            lines.append(line.strip().removeprefix("- "))
    links = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph) for paragraph in paragraphs)
    return [link for link in links if link]


def sentences(page: Path) -> list[str]:
    """Code counts as one word; a sentence ends at its mark or where a list begins."""
    found = []
    for paragraph in prose(page):
        text = re.sub(r"`[^`]*`|\$[^$]*\$", "CODE", paragraph)
        found += re.split(r"(?<=[.?!:])[*_)]*\s+(?=[A-Z0-9*_(])", text)
    return [sentence for sentence in found if len(sentence.split()) > 1]


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_sentences_are_short(page):
    lengths = {sentence: len(sentence.split()) for sentence in sentences(page)}
    longest = sorted(lengths, key=lambda sentence: -lengths[sentence])[:3]
    assert mean(lengths.values()) < 18, longest


@pytest.mark.parametrize("page", [page for page in PROSE if page.stem not in REFERENCE], ids=name)
def test_a_page_begins_with_its_answer(page):
    """Text before the first heading or block, and not much of it."""
    text = page.read_text().partition("\n")[2].strip()
    assert re.match(r"[A-Z`*\[]", text), "a page begins with a sentence"
    opening = re.split(r"^(?:```|#|\||!\[)", text, maxsplit=1, flags=re.M)[0]
    assert len(opening.split()) <= 90, opening


def test_that_no_gpu_has_run_it_is_said_where_it_matters():
    said = {
        page.stem
        for page in PAGES
        if re.search(r"no GPU has|without a GPU of ours|run on CPUs alone", page.read_text())
    }
    assert said <= {"README", "trust"}


def test_no_included_table_is_a_page():
    """The site's table of contents names pages; a table that a page includes is not one."""
    included = set()
    for page in PAGES:
        included |= set(re.findall(r"\{include\} (tables/\S+)", page.read_text()))
    excluded = (DOCS / "conf.py").read_text()
    assert included and all(f'"{table}"' in excluded for table in included)


def test_the_readme_counts_the_algorithms():
    readme = (ROOT / "README.md").read_text()
    (total,) = re.findall(r"\*\*(\d+) algorithms", readme)
    (other,) = re.findall(r"guided KL and (\d+) other", readme)
    assert int(total) == int(other) + 1 == len(ALGORITHMS)
