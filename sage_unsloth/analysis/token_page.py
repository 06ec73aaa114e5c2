"""Self-contained HTML pages: where a guide acts, token by token; and case studies.

A page loads and executes nothing (`runs.html`), so any completion is shown as text. Values appear
on hover, focus and touch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sage_unsloth.analysis.patterns import Case
from sage_unsloth.runs.html import escape, page


@dataclass(frozen=True)
class TokenTrace:
    """One completion: what a guide saw of each of its T tokens, and its log q.

    Attributes:
        title: model, problem, sample.
        tokens: T texts.
        entropies: H_t before each token, nats.
        log_guides: log q_t.
        policy_logps, ref_logps: log π(y_t | s_t) and log π_ref(y_t | s_t), nats.

    Raises:
        ValueError: no tokens, different numbers of values, or a value that is not finite.
    """

    title: str
    problem: str
    tokens: tuple[str, ...]
    entropies: tuple[float, ...]
    log_guides: tuple[float, ...]
    policy_logps: tuple[float, ...]
    ref_logps: tuple[float, ...]

    def __post_init__(self) -> None:
        values = (self.entropies, self.log_guides, self.policy_logps, self.ref_logps)
        sizes = [len(self.tokens), *map(len, values)]
        if not self.tokens or len(set(sizes)) > 1:
            raise ValueError(
                f"a trace has at least one token and one of each value for it, got {sizes}"
            )
        if not all(math.isfinite(value) for row in values for value in row):
            raise ValueError(f"values of a trace must be finite, but {self.title!r} has others")


TOKEN_STYLE = """
:root { --entropy: #e69f00; --more: #56a5d8; --less: #e08a5a; }
@media (prefers-color-scheme: dark) { :root { --entropy: #8a5f00; --more: #1c5f8f; --less:
  #94421a; } }
.tokens { font: 15px/2 ui-monospace, monospace; white-space: pre-wrap; }
.tokens span { position: relative; border-radius: 3px; padding: .15em .02em; outline: 1px solid
  transparent; box-shadow: inset -1px 0 var(--card); unicode-bidi: isolate; }
.e span { background: color-mix(in srgb, var(--entropy) calc(var(--a) * 100%), transparent); }
.m { background: color-mix(in srgb, var(--more) calc(var(--a) * 100%), transparent); }
.l { background: color-mix(in srgb, var(--less) calc(var(--a) * 100%), transparent); }
.tokens .l { text-decoration: underline dotted; }
.tokens span:hover, .tokens span:focus { outline-color: var(--text); }
.tokens span:hover::after, .tokens span:focus::after { content: attr(data-values); position:
  fixed; left: 1rem; bottom: 1rem; z-index: 1; max-width: calc(100vw - 2rem); padding: .4rem
  .6rem; border-radius: 4px; color: var(--page); background: var(--text); font: 14px/1.4
  system-ui, sans-serif; white-space: pre-wrap; }
.legend { display: flex; gap: .6rem; align-items: center; flex-wrap: wrap; font-size: .85rem;
  color: var(--faint); }
.bar { width: 9rem; height: 1rem; border: 1px solid var(--line); }
.bar.entropy { background: linear-gradient(90deg, transparent, var(--entropy)); }
.bar.guide { background: linear-gradient(90deg, var(--less), transparent, var(--more)); }
"""


def trace_page(traces: Sequence[TokenTrace], title: str, note: str = "") -> str:
    """A page of completions, each token shaded by its entropy, and again by its log-guide.

    The whole page has one scale: entropy from 0 to the largest, log q symmetric to the largest of
    either sign. Values of a token are shown on hover or keyboard focus.

    Raises:
        ValueError: there are no traces.
    """
    if not traces:
        raise ValueError("a page needs at least one completion")
    entropy = max(value for trace in traces for value in trace.entropies)
    guide = max(abs(value) for trace in traces for value in trace.log_guides)
    touched = sum(value != 0 for trace in traces for value in trace.log_guides)
    total = sum(len(trace.tokens) for trace in traces)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(note)}</p>" if note else "",
        '<div class="legend"><span>entropy H<sub>t</sub></span><span>0</span>'
        f'<span class="bar entropy"></span><span>{entropy:.3f} nats</span></div>',
        f'<div class="legend"><span>log-guide log q<sub>t</sub></span><span>{-guide:.4f}</span>'
        f'<span class="bar guide"></span><span>+{guide:.4f} nats</span>'
        "<span>above 0 the anchor is raised; below 0 it is lowered, and underlined</span></div>",
        f'<p class="note">The guide changes {touched} of {total} tokens (q ≠ 1). Point at a token, '
        "or step to it with the Tab key, for its values. ␣ ↵ ∅ mark a token of spaces alone, a "
        "line break and a token without text.</p>",
    ]
    for trace in traces:
        body.append(_section(trace, entropy or 1.0, guide or 1.0))
    return page(title, body, TOKEN_STYLE)


def _section(trace: TokenTrace, entropy_scale: float, guide_scale: float) -> str:
    by_entropy, by_guide = [], []
    for place, token in enumerate(trace.tokens):
        h, log_q = trace.entropies[place], trace.log_guides[place]
        values = (
            f"token {place + 1}: {token!r}\nentropy H = {h:.4f} nats\n"
            f"log q = {log_q:+.4f} (q = {math.exp(log_q):.4f})\n"
            f"log π = {trace.policy_logps[place]:.4f}\nlog π_ref = {trace.ref_logps[place]:.4f}"
        )
        shared = f'tabindex="0" data-values="{escape(values)}"'
        text = escape(_visible(token))
        by_entropy.append(
            f'<span {shared} data-entropy="{h:.6g}" '
            f'style="--a:{h / entropy_scale:.3f}">{text}</span>'
        )
        side = "m" if log_q > 0 else "l" if log_q < 0 else "n"
        by_guide.append(
            f'<span class="{side}" {shared} data-log-guide="{log_q:.6g}" '
            f'style="--a:{abs(log_q) / guide_scale:.3f}">{text}</span>'
        )
    return "\n".join(
        [
            f"<section><h2>{escape(trace.title)}</h2><p>{escape(trace.problem)}</p>",
            f'<h3>shaded by entropy</h3><div class="tokens e">{"".join(by_entropy)}</div>',
            f'<h3>shaded by log-guide</h3><div class="tokens g">{"".join(by_guide)}</div>'
            "</section>",
        ]
    )


def _visible(token: str) -> str:
    """A visible mark for an invisible token."""
    if not token:
        return "∅"
    if not token.strip(" "):
        return "␣" * len(token)
    return token.replace("\n", "↵\n")


# In a notebook the table is among another style's rules.
_CELL = 'style="text-align: left; vertical-align: top; white-space: nowrap"'
_TEXT_CELL = _CELL.replace("nowrap", "pre-wrap; overflow-wrap: anywhere")


def case_table(case: Case) -> str:
    """One case as an HTML table, a row for each model; escaped."""
    rows = [
        f"<tr><th {_CELL}>{escape(model)}</th><td {_CELL}>{result['correct']} of "
        f"{result['samples']}</td>"
        + "".join(_sample_cell(result[name]) for name in ("first correct", "first wrong"))
        + "</tr>"
        for model, result in case.models.items()
    ]
    problem = case.problem or case.problem_id
    return (
        f"<p>{escape(case.problem_id)}: {escape(problem)} (right: {escape(case.gold)})</p>"
        '<div class="wide"><table><tr>'
        + "".join(
            f"<th {_CELL}>{name}</th>"
            for name in ("model", "correct", "first correct sample", "first wrong sample")
        )
        + "</tr>"
        + "".join(rows)
        + "</table></div>"
    )


def _sample_cell(record: dict | None) -> str:
    if record is None:
        return f"<td {_CELL}>none</td>"
    return f'<td class="text" {_TEXT_CELL}>[{record["sample"]}] {escape(record["completion"])}</td>'


def case_page(cases: Sequence[Case], title: str, rule: str) -> str:
    """A page of case studies, with the rule that selected them."""
    body = [f"<h1>{escape(title)}</h1>", f"<p>Picked by rule: {escape(rule)}.</p>"]
    body += [f"<section>{case_table(case)}</section>" for case in cases]
    return page(title, body, TOKEN_STYLE)
