"""What the pages show runs: Python blocks are executed, commands parse, the site builds."""

import ast
import importlib.util
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import zlib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
from fontTools.ttLib import TTFont

import sage_unsloth
from sage_unsloth.__main__ import IN_A_CLONE, make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = "<!-- not run here: "


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Code of a page with the line above it."""
    pattern = rf"([^\n]*)\n```{language}\n(.*?)^```"
    return re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)


def with_blocks(language: str) -> list:
    pages = [page for page in PAGES if blocks(page, language)]
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in pages]


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_blocks_run_in_their_order(page, request, tmp_path, monkeypatch):
    run = [code for above, code in blocks(page, "python") if not above.startswith(NOT_RUN)]
    if any("load_unsloth" in code for code in run):
        request.getfixturevalue("unsloth_module")
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code in run:
        exec(compile(code, str(page), "exec"), namespace)
    if page.name == "guides.md":
        logged = namespace["trainer"].state.log_history
        assert [entry["step"] for entry in logged if "sage/guide_mean" in entry] == [1, 2]


@pytest.mark.parametrize("page", with_blocks("python"))
def test_blocks_that_are_not_run_import_what_exists(page):
    for above, code in blocks(page, "python"):
        if not above.startswith(NOT_RUN):
            continue
        for statement in ast.walk(ast.parse(code)):
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(
                ("sage_unsloth", "research")
            ):
                for alias in statement.names:
                    pkgutil.resolve_name(f"{statement.module}.{alias.name}")


@pytest.mark.parametrize("page", with_blocks("bash"))
def test_commands_parse(page, capsys):
    parser = make_parser()
    for _, code in blocks(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            for command in re.split(r"&&|\|", line.split("  #")[0]):
                words = shlex.split(command, comments=True)
                check_command(parser, words, capsys)


def test_the_first_page_has_every_command():
    first = (ROOT / "docs" / "index.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", first, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    (commands,) = (a for a in make_parser()._actions if a.dest == "command")
    assert named == set(commands.choices)


def check_command(parser, words: list[str], capsys) -> None:
    if "-m" in words and words[words.index("-m") + 1].startswith(("sage_unsloth", "research")):
        at = words.index("-m") + 1
        assert importlib.util.find_spec(words[at]), words
        name = words[at].removeprefix("research.")
        if name in IN_A_CLONE:
            parser = importlib.import_module(f"{words[at]}.command").make_parser()
        if name in IN_A_CLONE or words[at] == "sage_unsloth":
            try:
                parser.parse_args(words[at + 1 :])
            except SystemExit as end:  # 0 after --help
                assert not end.code, f"{shlex.join(words)}: {capsys.readouterr().err[-300:]}"
    script = next((word for word in words if word.endswith(".py")), None)
    if script and words[0].endswith("python"):
        assert (ROOT / script).exists(), script


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `.ci/run` builds it: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", out],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return out


def public_names() -> set[str]:
    """The lazy exports of each room, at run time."""
    found = set()
    for init in (ROOT / "sage_unsloth").glob("*/__init__.pyi"):
        room = importlib.import_module(f"sage_unsloth.{init.parent.name}")
        found |= {f"{room.__name__}.{name}" for name in room.__all__}
    return found


@pytest.mark.long
def test_the_site_has_every_public_name(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    described = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert public_names() - described == set(), "give these a docstring"
    listed = (site / "api" / "root.html").read_text()
    missing = [name for name in sage_unsloth.__all__ if f">{name}</span>" not in listed]
    assert missing == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("own questions", "own_data.html"),
        ("out of memory", "troubleshooting.html"),
        ("resume", "train.html"),
        ("T4", "hosted.html"),
    ],
)
def test_search_leads_to_the_page_that_answers(site, browse, words, page):
    """In the first three hits of the site's own search, in a browser."""
    address = f"{(site / 'search.html').as_uri()}?{urlencode({'q': words})}"
    dom, _ = browse(
        SimpleNamespace(as_uri=lambda: address), "--dump-dom", "--virtual-time-budget=9000"
    )
    results = dom.partition('class="search">')[2]
    hits = re.findall(r'<li[^>]*><a href="([^"?#]+)', results)
    assert page in hits[:3], hits[:6]


@pytest.mark.long
def test_the_sites_font_has_every_character_of_its_formulas(site):
    (font,) = site.rglob("math.woff")
    assert {"MATH", "cmap"} <= set((shipped := TTFont(font)).keys())
    text = "".join(
        unescape(re.sub(r"<[^>]+>", "", formula))
        for page in site.rglob("*.html")
        for formula in re.findall(r"<math.*?</math>", page.read_text(), re.DOTALL)
    )
    invisible = {"\u2061", "\n", "\u2009"}
    assert "‖" in text
    assert {letter for letter in text if ord(letter) not in shipped.getBestCmap()} <= invisible
    assert not re.search("<mo>[‖|]</mo>", (site / "method.html").read_text()), "bars that stretch"


class Sources(HTMLParser):
    """What a page loads, and images without words."""

    def __init__(self) -> None:
        super().__init__()
        self.remote, self.unnamed = [], []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        loaded = values.get("src") or (values.get("href") if tag == "link" else None) or ""
        if re.match(r"(https?:)?//", loaded) and values.get("rel") != "canonical":
            self.remote.append(loaded)
        if tag == "img" and not values.get("alt"):
            self.unnamed.append(values.get("src"))


@pytest.mark.long
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        sources = Sources()
        sources.feed(page.read_text())
        assert sources.remote == [], page.name
        assert sources.unnamed == [], page.name
