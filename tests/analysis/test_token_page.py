"""The HTML pages: hostile text stays text, values are in the DOM, and a real browser shows them in
dark and light.
"""

import html
import re
from html.parser import HTMLParser

import pytest
from browser import HOSTILE

from sage_unsloth.analysis.patterns import Case
from sage_unsloth.analysis.token_page import TokenTrace, case_page, case_table, escape, trace_page

ALLOWED = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "h3",
    "p",
    "div",
    "span",
    "section",
    "sub",
}


def make_trace(tokens=HOSTILE, title="m, p<1>, sample 0", **values):
    n = len(tokens)
    values = {
        "entropies": tuple(0.1 * i for i in range(n)),
        "log_guides": tuple(0.05 * (i % 3 - 1) for i in range(n)),
        "policy_logps": tuple(-0.5 * i for i in range(n)),
        "ref_logps": tuple(-0.25 * i for i in range(n)),
    } | values
    return TokenTrace(title=title, problem="1<2 & \"3\">'2'", tokens=tuple(tokens), **values)


class Reader(HTMLParser):
    """Start tags with their attributes, and the text of each token's element."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.spans, self.text, self.stack = [], [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "span" and "data-values" in dict(attributes):
            self.spans.append([dict(attributes), ""])
            self.stack.append(self.spans[-1])

    def handle_endtag(self, tag):
        if tag == "span" and self.stack:
            self.stack.pop()

    def handle_data(self, data):
        self.text += data
        if self.stack:
            self.stack[-1][1] += data


def test_text_is_escaped():
    assert escape('<a href="x">\'&') == "&lt;a href=&quot;x&quot;&gt;&#x27;&amp;"
    assert escape("\x00\x1b\r\x7f\n\t") == "␀␛␍␡\n\t"
    assert escape("a\u202eb\u2066\u200f\ud800") == "a\ufffdb\ufffd\ufffd\ufffd"
    escape("\ud83d").encode("utf-8")


def test_hostile_tokens_add_no_element():
    page = Reader(trace_page([make_trace()], '"><script>1</script>', note="<b>"))
    assert {tag for tag, _ in page.tags} <= ALLOWED
    assert sum(tag == "style" for tag, _ in page.tags) == 1
    names = {name for _, attributes in page.tags for name in attributes}
    assert not any(name.startswith("on") or name in ("src", "href") for name in names)
    assert len(page.spans) == 2 * len(HOSTILE)
    shown = [text for _, text in page.spans[: len(HOSTILE)]]
    assert shown[0] == HOSTILE[0] and shown[1] == HOSTILE[1]
    assert shown[-4:-1] == ["↵\n", "␣␣", "∅"] and shown[-1] == HOSTILE[-1]


def test_values_are_in_the_page():
    trace = make_trace(
        ("a", "b"),
        entropies=(0.0, 1.5),
        log_guides=(0.0, -0.25),
        policy_logps=(-1.0, -2.0),
        ref_logps=(-3.0, -4.5),
    )
    page = Reader(trace_page([trace], "t"))
    attributes = [attributes for attributes, _ in page.spans]
    assert [a["data-entropy"] for a in attributes[:2]] == ["0", "1.5"]
    assert [a["style"] for a in attributes[:2]] == ["--a:0.000", "--a:1.000"]
    assert [a["data-log-guide"] for a in attributes[2:]] == ["0", "-0.25"]
    assert [a["class"] for a in attributes[2:]] == ["n", "l"]
    for part in (
        "H = 1.5000 nats",
        "log q = -0.2500 (q = 0.7788)",
        "log π = -2.0000",
        "log π_ref = -4.5000",
    ):
        assert part in attributes[1]["data-values"]
    assert "changes 1 of 2 tokens" in page.text
    assert "1.500 nats" in page.text and "+0.2500 nats" in page.text


def test_a_guide_that_does_nothing_is_shown_as_that():
    page = trace_page(
        [
            make_trace(
                ("a",), entropies=(0.0,), log_guides=(0.0,), policy_logps=(0.0,), ref_logps=(0.0,)
            )
        ],
        "t",
    )
    assert "changes 0 of 1 tokens" in page and "--a:0.000" in page and "nan" not in page


def test_a_page_loads_nothing():
    for page in (trace_page([make_trace()], "t"), case_page(cases(), "t", "rule")):
        policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
        assert policy[1] == "default-src 'none'; style-src 'unsafe-inline'"
        style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
        assert "url(" not in style and "@import" not in style


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(tokens=()), "at least one token"),
        (dict(tokens=("a",), entropies=(1.0, 2.0)), r"got \[1, 2, 1, 1, 1\]"),
        (dict(tokens=("a",), ref_logps=(float("-inf"),)), "must be finite"),
    ],
)
def test_bad_traces_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        make_trace(**values)
    with pytest.raises(ValueError, match="at least one completion"):
        trace_page([], "t")


def cases():
    found = {"correct": 1, "samples": 2, "first wrong": None}
    models = {
        "<m>": found | {"first correct": {"sample": 1, "completion": HOSTILE[1]}},
        "n": found | {"first correct": {"sample": 0, "completion": "ok\n<br>"}},
    }
    return [Case("p<1>", "2 < 3?", "<b>", models)]


def test_case_tables_are_escaped():
    reader = Reader(case_table(cases()[0]))
    assert {tag for tag, _ in reader.tags} == {"p", "div", "table", "tr", "th", "td"}
    for text in ("<m>", f"[1] {HOSTILE[1]}", "[0] ok\n<br>", "2 < 3?", "1 of 2", "none", "<b>"):
        assert text in reader.text
    assert {tag for tag, _ in Reader(case_page(cases(), "<t>", "<rule>")).tags} <= ALLOWED | {
        "table",
        "tr",
        "th",
        "td",
    }


# --- in a browser
# -----------------------------------------------------------------------------------


def test_a_browser_shows_values_and_runs_nothing(browse, tmp_path):
    file = tmp_path / "page.html"
    page = trace_page([make_trace()], "Where the guide acts")
    # Without the policy that forbids scripts, so that the escaping alone is tried.
    file.write_text(re.sub(r"<meta http-equiv.*?>", "", page), encoding="utf-8")
    assert "Content-Security-Policy" not in file.read_text(encoding="utf-8")
    dom, console = browse(file, "--dump-dom")
    assert console == []
    assert "<title>Where the guide acts</title>" in dom, "no script has changed it"
    reader = Reader(dom)
    assert {tag for tag, _ in reader.tags} <= ALLOWED
    assert [text for _, text in reader.spans[:2]] == list(HOSTILE[:2])
    assert "H = 0.1000 nats" in html.unescape(reader.spans[1][0]["data-values"])


def test_the_browser_test_would_notice_a_script(browse, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(f"<title>t</title><p>{HOSTILE[1][2:]}</p>", encoding="utf-8")
    dom, _ = browse(file, "--dump-dom", "--virtual-time-budget=2000")
    assert "<title>owned</title>" in dom


def test_dark_and_light_both_are_legible(browse, tmp_path):
    from matplotlib.image import imread

    file = tmp_path / "page.html"
    file.write_text(trace_page([make_trace()], "Where the guide acts"), encoding="utf-8")
    pictures = {}
    for name, options in {"light": (), "dark": ("--force-dark-mode",)}.items():
        browse(file, *options, f"--screenshot={tmp_path / name}.png")
        pictures[name] = imread(tmp_path / f"{name}.png")[:, :, :3].mean(axis=2)
    light, dark = pictures["light"], pictures["dark"]
    assert light[2, 2] > 0.95 and dark[2, 2] < 0.15, "the page's own colour"
    # Text stands out from its page: some pixels are far from the background.
    assert light.min() < 0.25 and dark.max() > 0.85
    assert 0.01 < (light < 0.5).mean() < 0.3 and 0.01 < (dark > 0.5).mean() < 0.3
