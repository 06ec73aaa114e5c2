"""The page of a comparison: what it says, hostile text, its bounds; and in a real browser."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from browser import HOSTILE

from sage_unsloth.evaluation.comparison_page import CASES, MAX_NAMES, TEXT, choose_cases
from sage_unsloth.evaluation.record_tables import record_set
from sage_unsloth.evaluation.report import report_sets

ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "h4", "p", "div"),
    *("span", "section", "table", "tr", "th", "td", "br", "small", "details", "summary", "pre"),
    *("em", "b", "svg", "g", "path", "text", "defs", "use", "clippath", "rect"),
}


def samples(model, correct_PN, *, benchmark="toy", texts=None, write=lambda p, s: f"{p}, {s}"):
    records = [
        {
            "problem_id": f"p{problem}",
            "sample": sample,
            "grade": "correct" if right else "wrong",
            "gold": f"gold {problem}",
            "completion": write(problem, sample),
            "num_tokens": 1,
            "finish_reason": "stop",
            "grader": "math 3",
        }
        for problem, row in enumerate(correct_PN)
        for sample, right in enumerate(row)
    ]
    one = record_set(records, model, benchmark, {"temperature": 1.0})
    return replace(one, texts=texts or {})


class Reader(HTMLParser):
    """Start tags with their attributes, and all text by the innermost tag."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def inside(self, tag):
        return [text for name, text in self.texts if name == tag]


def page_of(sets, folder):
    report_sets(sets, folder)
    return (folder / "comparison.html").read_text(encoding="utf-8")


A = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
B = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]]


def test_a_page_says_what_the_report_says(tmp_path):
    """pass@1 of a: 6/12; of b: 5/12; p0 is solved by a alone, p1 by b."""
    page = page_of([samples("a", A, texts={"p0": "What is 1 < 2?"}), samples("b", B)], tmp_path)
    reader = Reader(page)
    assert {"pass@k", "difference of pass@k", "k (samples)"} <= {*reader.inside("text")}
    assert [text.strip() for text in reader.inside("span")[:3]] == ["a", "b", "b - a"]
    cells = reader.inside("td")
    assert {"0.500", "0.417", "-0.083"} <= {*cells}
    summaries = reader.inside("summary")
    assert "a: 1 alone, of 2 that it solves" in summaries
    assert "p0: a 2 of 4; b 0 of 4 correct" in summaries
    # Of each model the first correct and the first wrong sample, and the problem where it is known.
    shown = reader.inside("pre")
    assert shown[:4] == ["What is 1 < 2?", "0, 0", "0, 2", "0, 0"]
    assert "<pre></pre>" not in page and "characters more" not in page
    assert any("T = 1" in text for text in reader.inside("p"))


def test_cases_are_chosen_by_the_rule():
    """Shares: p0 .5 and 0, p1 0 and .25, p2 1 and 1; p0 and p1 are solved by one alone."""
    sets = {"a": samples("a", A), "b": samples("b", B)}
    assert choose_cases(sets, {"a": ["p0"], "b": ["p1"]}) == ["p0", "p1", "p2"]
    assert choose_cases(sets, {"a": [], "b": []}) == ["p0", "p1", "p2"]
    assert choose_cases({"a": sets["a"]}, {}) == ["p0", "p1", "p2"]  # .5 first, then 0 and 1


def test_a_page_is_bounded(tmp_path):
    long = "x" * 50_000
    many = [[1, 0]] * 300
    page = page_of(
        [
            samples("a", many, write=lambda p, s: long),
            samples("b", [[0, 0]] * 300, write=lambda p, s: long),
        ],
        tmp_path,
    )
    assert len(page) < 60_000 + CASES * 3 * (TEXT + 500)
    assert f"… and {300 - MAX_NAMES} more" in page
    assert f"… {50_000 - TEXT:,} characters more" in page
    summaries = Reader(page).inside("summary")
    assert sum("correct" in text for text in summaries) == CASES


def hostile_page(folder):
    """A page all of whose names and texts are hostile."""
    names = ("p0", "p1", "p2")
    sets = []
    for model, correct in (("</title><script>1</script>", A), ('"><img onerror=1 src=x>', B)):
        one = samples(model, correct, benchmark="<b>", write=lambda p, s: "".join(HOSTILE))
        one = replace(one, texts=dict.fromkeys(names, "".join(HOSTILE)))
        sets.append(replace(one, golds=dict.fromkeys(names, HOSTILE[4])))
    return page_of(sets, folder)


def test_hostile_text_adds_no_element(tmp_path):
    page = hostile_page(tmp_path)
    reader = Reader(page)
    assert reader.open == [] and {tag for tag, _ in reader.tags} <= ALLOWED
    assert sum(tag == "style" for tag, _ in reader.tags) == 1
    names = {name for _, attributes in reader.tags for name in attributes}
    assert not any(name.startswith("on") or name in ("src", "href") for name in names)
    assert any(HOSTILE[0] in text for text in reader.inside("pre"))
    assert "\u202e" not in page and "\x1b" not in page


def test_a_page_loads_nothing(tmp_path):
    page = hostile_page(tmp_path)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert "url(" not in style and "@import" not in style


def test_a_browser_shows_it_and_runs_nothing(browse, tmp_path):
    page = hostile_page(tmp_path)
    file = tmp_path / "page.html"
    # Without the policy that forbids scripts, so that the escaping alone is tried.
    file.write_text(re.sub(r"<meta http-equiv.*?>", "", page), encoding="utf-8")
    dom, console = browse(file, "--dump-dom")
    assert console == [] and "<title>pass@k: &lt;/title&gt;&lt;script&gt;" in dom
    assert {tag for tag, _ in Reader(dom).tags} <= ALLOWED | {"tbody"}


def framed(folder, width, script=""):
    """The page in a frame of so many pixels: a window of the browser has at least 500."""
    page_of([samples("a", A), samples("b" * 60, B)], folder)
    frame = folder / "frame.html"
    frame.write_text(
        '<body style="margin:0"><iframe id="frame" src="comparison.html" '
        f'style="width:{width}px;height:900px;border:0"></iframe>{script}'
    )
    return frame


def test_nothing_sticks_out_of_a_phone(browse, tmp_path):
    measure = (
        "<script>onload = () => { const page = document.getElementById('frame')"
        ".contentDocument.documentElement;"
        "document.title = `${page.clientWidth} ${page.scrollWidth}` }</script>"
    )
    frame = framed(tmp_path, 390, measure)
    dom, _ = browse(frame, "--dump-dom", "--allow-file-access-from-files")
    assert "<title>390 390</title>" in dom


@pytest.mark.parametrize("width", [390, 1200])
def test_it_is_legible_in_dark_and_light(browse, tmp_path, width):
    from matplotlib.image import imread

    frame = framed(tmp_path, width)
    size = f"--window-size={max(width, 500)},900"
    for name, options in {"light": (), "dark": ("--force-dark-mode",)}.items():
        browse(frame, size, *options, f"--screenshot={tmp_path / name}.png")
        grey = imread(tmp_path / f"{name}.png")[:, :width, :3].mean(axis=2)
        if name == "light":
            assert grey[2, 2] > 0.95 and grey.min() < 0.25
        else:
            assert grey[2, 2] < 0.15 and grey.max() > 0.85
