"""Identifiers say what a thing is, messages are one sentence, comments stand beside odd lines."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sage_unsloth"
RETIRED = {"found", "one", "wanted", "kept", "asked", "told", "ours", "theirs"}
MOST = 1.0
"""Of them in a thousand lines."""
MAY_REPEAT = {"logger"}
"""Public names that several modules define; `logger` is that of each module."""
SHOWS_TEXT = re.compile(r"(print|print_line|warn|warning|info|error|exception|exit)$")
MOST_WORDS = 15.5
"""In the mean message, with the values in it counted as a word each."""
COMMENTED = ("objective", "patch", "methods", "grading", "training")
LEAST = 0.03
"""Of lines that are a comment, empty ones aside, in each of these folders."""


def identifiers(source: str) -> list[str]:
    """Every name that is read, bound, passed, defined or taken as a parameter."""
    result = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                result.append(name)
            case ast.keyword(arg=str(name)):
                result.append(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                result.append(name)
    return result


def public_names(source: str) -> set[str]:
    """Functions, classes and constants of a module without an underscore; imports do not count."""
    names: list[str] = []
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                names += [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return {name for name in names if not name.startswith("_")}


def messages(source: str) -> Iterator[str]:
    """The texts within a raise, or within a call that shows or logs them; a value is "{}"."""
    for node in ast.walk(ast.parse(source)):
        called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Raise):
            yield from _texts(node.exc)
        elif SHOWS_TEXT.match(called):
            yield from (text for argument in node.args for text in _texts(argument))


def _texts(node: ast.AST | None) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in parts)
        case ast.Call(args=arguments):
            for argument in arguments:
                yield from _texts(argument)
        case ast.BinOp(left=left, right=right):
            yield from (*_texts(left), *_texts(right))
        case ast.IfExp(body=body, orelse=other):
            yield from (*_texts(body), *_texts(other))


@pytest.mark.smoke
def test_words_that_fit_everything_are_rare():
    counts, num_lines = Counter(), 0
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        num_lines += source.count("\n")
        retired = sum(name.strip("_") in RETIRED for name in identifiers(source))
        counts[path.relative_to(PACKAGE).as_posix()] = retired
    worst = {name: count for name, count in counts.most_common(8) if count}
    assert counts.total() / num_lines * 1000 <= MOST, f"{counts.total()} in {num_lines}: {worst}"


@pytest.mark.smoke
def test_no_public_name_is_defined_twice():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in public_names(path.read_text(encoding="utf-8")) - MAY_REPEAT:
            places[name].append(path.relative_to(PACKAGE).as_posix())
    assert len(places) > 1000
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


@pytest.mark.smoke
def test_a_message_has_no_semicolon_and_few_words():
    texts = [
        (path.name, text)
        for path in PACKAGE.rglob("*.py")
        for text in messages(path.read_text(encoding="utf-8"))
        if len(text.split()) > 3  # a name, a separator or a table's cell is no message
    ]
    joined = [item for item in texts if re.search(r";(\s|$)", item[1])]
    assert len(texts) > 500 and not joined, joined
    assert sum(len(text.split()) for _, text in texts) / len(texts) <= MOST_WORDS


@pytest.mark.parametrize("folder", COMMENTED)
def test_comments_stand_beside_odd_lines(folder):
    lines = [
        line.strip()
        for path in (PACKAGE / folder).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    share = sum(line.startswith("#") for line in lines) / sum(map(bool, lines))
    assert share >= LEAST, f"{share:.2%} of the lines of {folder} are comments"


def test_every_kind_of_name_is_counted():
    source = "def f(found, *, key):\n    return [one for one in found]\nf.kept(told=1)\n"
    assert Counter(identifiers(source)) == Counter(
        ["f", "f", "found", "found", "key", "one", "one", "kept", "told"]
    )


def test_public_names_are_those_that_a_module_defines():
    source = "from x import a\nB, c = 1, 2\nD: int = 3\n_E = 4\n"
    source += "def f(g):\n    h = 1\nclass I:\n    j = 2\n"
    assert public_names(source) == {"B", "c", "D", "f", "I"}


def test_messages_are_read_in_raises_and_in_calls_that_show_them():
    source = (
        "def f(x):\n    '''a; b'''\n    print('c ' + (f'{x} d' if x else 'e'))\n"
        "    raise ValueError(f'g {x}') from x\nlogger.warning('h %s', x)\n"
    )
    assert sorted(messages(source)) == ["c ", "e", "g {}", "h %s", "{} d"]
