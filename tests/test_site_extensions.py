"""What `docs/extensions` makes of docstrings, links and formulas."""

import importlib
import sys
from pathlib import Path

import pytest
from docutils import nodes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture
def extension(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    yield importlib.import_module
    for name in ("docstrings", "repository", "mathml", "api_pages"):
        sys.modules.pop(name, None)


def test_a_docstring_is_text_and_its_indented_blocks_are_code(extension):
    written = ["β * x and |x| of name_, `a_b*`.", "", "    run(*args)", "", "After.", "", "Args:"]
    assert extension("docstrings").as_restructured_text(written) == [
        r"β \* x and \|x\| of name\_, ``a_b*``.",
        "",
        "::",
        "",
        "    run(*args)",
        "",
        "After.",
        "",
        "Args:",
    ]


def test_a_plural_behind_code_and_names_that_share_a_line(extension):
    docstrings = extension("docstrings")
    assert docstrings.escaped("the *same* a *b, 2 * 3 * 4") == r"the *same* a \*b, 2 \* 3 \* 4"
    assert docstrings.escaped("further `Callback`s") == r"further ``Callback``\ s"
    lines = [":ivar epsilon, epsilon_high: clip range.", ":ivar beta: KL coefficient."]
    docstrings.join_names(None, "class", "", None, None, lines)
    assert lines == [":ivar epsilon,\u200bepsilon_high: clip range.", ":ivar beta: KL coefficient."]


def test_a_signature_names_the_default_prompt(extension):
    from sage_unsloth.prompts import PROJECT_PROMPT

    given = f"(prompt: PromptFormat = {PROJECT_PROMPT!r}, seed: int = 1)"
    found, _ = extension("docstrings").shorten_signature(None, "class", "", None, None, given, None)
    assert found == "(prompt: PromptFormat = PROJECT_PROMPT, seed: int = 1)"


def test_a_long_signature_stands_below_the_text(extension):
    docstrings = extension("docstrings")
    signature = "(" + ", ".join(f"parameter_{number}: int = {number}" for number in range(9)) + ")"
    shown = docstrings.shorten_signature(None, "function", "f", None, None, signature, "int")
    assert shown == ("(…)", None)
    lines = ["What it does."]
    docstrings.add_signature(None, "function", "f", None, None, lines)
    assert lines[0] == "What it does." and " ".join(map(str.strip, lines)).endswith("= 8) -> int ")
    assert max(map(len, lines)) <= 92


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](hardware.md#b)", "[a](hardware.md#b)"),
        ("[a](#b) [c](https://d.e)", "[a](#b) [c](https://d.e)"),
        ("[five](../notebooks/05_theory.ipynb)", "[five](tutorials/05_theory.ipynb)"),
        ("[how](../CONTRIBUTING.md#how-to-add)", "[how](contributing.md#how-to-add)"),
        (
            "[figures](../data/results)",
            "[figures](https://github.com/sage-unsloth/sage_unsloth/tree/main/data/results)",
        ),
        ("![a](../data/b.png)", "![a](../data/b.png)"),
        ("[![Colab](https://a.b/c.svg)](https://d.e)", "[Colab](https://d.e)"),
    ],
)
def test_links_lead_to_the_site_or_to_the_repository(extension, written, shown):
    page = DOCS / "train.md"
    assert extension("repository").on_the_site(written, page, page) == shown


def test_an_included_page_keeps_its_links(extension):
    on_the_site = extension("repository").on_the_site
    written = "[plan](docs/hardware.md#what-fits-in-memory) ![a](data/b.png)"
    assert (
        on_the_site(written, ROOT / "CONTRIBUTING.md", DOCS / "contributing.md")
        == "[plan](hardware.md#what-fits-in-memory) ![a](../data/b.png)"
    )


def test_a_formula_is_mathml_and_an_unknown_command_is_named(extension):
    formula = extension("mathml").formula
    assert "<msub>" in formula(nodes.math(text="q_t"), as_block=False)
    assert 'display="block"' in formula(nodes.math_block(text="q_t"), as_block=True)
    with pytest.raises(ValueError, match=r"nonsense"):
        formula(nodes.math(text=r"\nonsense"), as_block=False)


def test_public_names_and_constants_of_a_room(extension):
    api = extension("api_pages")
    names = api.public_names(ROOT / "sage_unsloth" / "planning" / "__init__.pyi")
    assert names["CARDS"] == "presets"
    assert api.constants("planning")["CARDS"] == "Presets of GPUs by name."
