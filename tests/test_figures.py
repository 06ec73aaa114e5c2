"""Tables for a terminal: plain, as wide as they may be, and nothing in them is markup; intervals
in figures.
"""

import io
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.figures import (
    COLOURS,
    COLUMNS,
    LINES,
    error_bars,
    line_styles,
    show_table,
    table_html,
    table_text,
)

INTERVAL = "0.1234 [0.1234, 0.1234]"


def test_a_table_by_hand():
    rows = [{"model": "SFT", "pass@1": 0.25}, {"model": "SAGE-Branch", "pass@1": "1"}]
    assert table_text(rows) == "model        pass@1\nSFT          0.25\nSAGE-Branch  1"


def test_words_are_broken_before_a_table_is():
    rows = [{"name": "a b " * 30, "value": INTERVAL}, {"name": "c", "value": "-"}]
    lines = table_text(rows).splitlines()
    assert max(map(len, lines)) <= COLUMNS and len(lines) == 5
    assert lines[1].endswith(INTERVAL), "an interval stays with its mean"


def test_a_word_is_not_broken_where_its_table_fits():
    """Seven columns of 8 and two whose words take 6, with 2 between them: 84 of 84."""
    rows = [dict.fromkeys("abcdefg", "12345678") | {"dead groups": "0.250", "no answer": "0.250"}]
    header = ["a", "b", "c", "d", "e", "f", "g"]
    lines = table_text(rows, 84).splitlines()
    assert [line.split() for line in lines[:2]] == [["dead", "no"], [*header, "groups", "answer"]]
    assert max(map(len, lines)) == 84 and len(lines) == 3
    narrower = table_text(rows, 83).splitlines()
    assert narrower[0].split() == [*header, "dead", "groups"], "the last column follows below"
    long = [{"a": "x" * 30, "b": "y " * 40}]
    assert "x" * 30 in table_text(long, 50), "what has blanks is narrowed first"
    assert table_text([{"a": "two\nlines", "b": 1}]) == "a      b\ntwo    1\nlines"


def test_columns_that_do_not_fit_follow_below_beside_what_tells_the_rows_apart():
    rows = [
        {"metric": metric, "run": run} | dict.fromkeys(("early", "middle", "late"), INTERVAL)
        for metric in ("reward", "entropy")
        for run in ("GRPO", "SAGE-Branch")
    ]
    lines = table_text(rows).splitlines()
    assert lines[0].split() == ["metric", "run", "early", "middle"]
    assert lines[5] == "" and lines[6].split() == ["metric", "run", "late"]
    assert lines[10] == f"entropy  SAGE-Branch  {INTERVAL}"
    assert table_text(rows, 120).splitlines()[0].split()[-1] == "late"


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "JUPYTER_COLUMNS"])
def test_text_is_shown_as_it_is(monkeypatch, name, capsys):
    monkeypatch.setenv(name, "1")
    show_table([{"a": "[bold red]x[/] :smile: \x1b[31m", "b": "http://x 1.5 True"}], "[b]title")
    assert capsys.readouterr().out.splitlines() == [
        "",
        "[b]title",
        "a                             b",
        "[bold red]x[/] :smile: ␛[31m  http://x 1.5 True",
    ]


def test_a_terminal_says_how_wide_it_is(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    rows = [{"a": "x " * 60, "b": "y"}]
    for columns, lines in ((200, 2), (50, 4)):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = Terminal()
        monkeypatch.setattr("sys.stdout", shown)
        show_table(rows)
        assert len(shown.getvalue().splitlines()) == lines


def test_a_table_for_a_notebook_is_escaped():
    page = table_html([{"model": "<b>", "pass@1": 0.5}])
    assert "<td" in page and "&lt;b&gt;" in page and "<b>" not in page and ">0.5</td>" in page


def test_error_bars_end_where_the_intervals_do():
    found = [{"mean": 0.5, "low": 0.4, "high": 0.9}, {"mean": -2.0, "low": -5.0, "high": -1.0}]
    assert error_bars(found) == [pytest.approx([0.1, 3]), pytest.approx([0.4, 1])]


# --- The table of lines ---------------------------------------------------------------------------


def test_every_algorithm_has_a_line_of_its_own():
    from sage_unsloth.training import ALGORITHMS

    assert {*ALGORITHMS, "sft"} == set(LINES)
    assert len(set(LINES.values())) == len(LINES)
    assert {colour for colour, _, _ in LINES.values()} <= set(COLOURS)


def test_a_name_looks_the_same_in_every_figure():
    first = line_styles(["SFT", "GRPO", "SAGE-Branch"])
    second = line_styles(["mine", "sage-branch beta=0.1", "sage-branch beta=0.2", "grpo - sft"])
    for one, other in (("SAGE-Branch", "sage-branch beta=0.1"), ("GRPO", "grpo - sft")):
        keys = ("color", "marker", "linestyle")
        assert [first[one][key] for key in keys] == [second[other][key] for key in keys]
    looks = {(style["marker"], style["linestyle"], style["color"]) for style in second.values()}
    assert len(looks) == 4
    assert second["sage-branch beta=0.2"]["color"] == first["SAGE-Branch"]["color"]


def test_names_that_the_table_lacks_keep_their_line_from_levels_to_differences():
    names = [f"model-{number}" for number in range(60)]
    levels = line_styles(names)
    assert len({tuple(list(style.values())[:3]) for style in levels.values()}) > 40
    pairs = line_styles([f"{name} - {names[0]}" for name in names[1:]], first=1)
    assert pairs["model-3 - model-0"]["color"] == levels["model-3"]["color"]


@pytest.mark.parametrize("room", ["sage_unsloth", "research"])
def test_no_other_module_has_a_table_of_colours(room):
    greys = {"#888888", "#555555", "#333333", "#bbbbbb"}
    root = Path(__file__).parents[1] / room
    for file in root.rglob("*.py"):
        text = file.read_text()
        if file.name == "figures.py" and file.parent.name == "sage_unsloth":
            continue
        assert set(re.findall(r'"(#[0-9A-Fa-f]{6})"', text)) <= greys, file
        assert "prop_cycle" not in text and "COLOURS[" not in text, file


def test_a_model_looks_the_same_in_all_panels_and_every_one_is_in_the_legend(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *others, **more: saved.append(figure))
    curve = {k: Estimate(0.5, 0.4, 0.6) for k in (1, 2)}
    panels = {"x": dict.fromkeys("ab", curve), "y": dict.fromkeys("bac", curve)}
    plot_pass_at_k(panels, tmp_path / "f.png", "note")
    (figure,) = saved
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    looks = [
        {line.get_label(): line.get_color() for line in axis.lines if len(line.get_label()) == 1}
        for axis in figure.axes
    ]
    assert looks[0]["a"] == looks[1]["a"] != looks[0]["b"] == looks[1]["b"]
