"""The rules of docs/grading.md, over golds that nobody chose: what must be right, what must not.

The writings are the red team's, whose labels know nothing of the grader. A gold that fails is kept
as an `example`.
"""

import random
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from research.red_team_forms import shape, value, writings
from sage_unsloth.grading.checker import Grade, Kind, Verdict
from sage_unsloth.grading.forms import read
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import compare_math, grade_plainly
from sage_unsloth.grading.tree import INFINITY, Node, number
from sage_unsloth.grading.units import Unit
from sage_unsloth.grading.writing import as_words, normalise_spelling


def verdict(answer, gold):
    """Of this process alone, without a worker's limits: what is compared here is harmless."""
    found = grade_plainly(answer, gold)
    return found if isinstance(found, Verdict) else compare_math(*found)


# Not 0, of which a multiple is right too: "0 hundred", "594 * 0".
integers = st.integers(-9999, 10**7).filter(bool).map(str)
decimals = st.decimals(-999, 999, places=3, allow_nan=False).filter(bool).map(lambda d: f"{d:f}")
powers = st.builds(lambda a, b: f"{a / 100:.2f}e{b}", st.integers(100, 999), st.integers(-30, 30))
fractions = st.builds(lambda a, b: rf"\frac{{{a}}}{{{b}}}", st.integers(1, 99), st.integers(2, 99))
money = st.integers(1, 9999).map(lambda n: rf"\${n}")
degrees = st.integers(1, 359).map(lambda n: rf"{n}^\circ")
nouns = st.builds(lambda n, w: f"{n} {w}", st.integers(2, 999), st.sampled_from(["apples", "feet"]))
choices = st.sampled_from([rf"\text{{({c})}}" for c in "ABCDE"])
words = st.sampled_from(["ellipse", "Evelyn", "east", "parabola", "Tuesday"]).map(
    lambda word: rf"\text{{{word}}}"
)
bases = st.builds(lambda n, b: f"{n}_{b}", st.integers(10, 66666).map(oct), st.just(8)).map(
    lambda text: text.removeprefix("0o")
)
numbers = st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True)
lists = numbers.map(lambda found: ", ".join(map(str, found)))
points = numbers.map(lambda found: f"({', '.join(map(str, found))})")
halves = st.integers(-99, 99).map(lambda n: rf"({n}, \infty)")
ranges = st.builds(lambda a, b: f"[{a}, {a + b})", st.integers(-99, 99), st.integers(1, 99))
GOLDS = st.one_of(
    integers, decimals, powers, fractions, money, degrees, nouns, choices, words, bases, lists,
    points, halves, ranges,
)  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("x > 5%", "x > 5"), (r"42 > 43 \text{ cm}", "42 > 43"), (r"4 \mathrm{ft} \times 12", "143")],
)
def test_a_bound_or_length_with_a_unit_is_wrong_and_raises_nothing(answer, gold):
    assert verdict(answer, gold).grade is Grade.WRONG


@given(GOLDS, st.integers(0, 10**6))
@example("-1", 0)  # "$-1"
@example("1.00e-7", 1)
@settings(deadline=None, max_examples=60)
def test_right_writings_are_right_and_wrong_ones_are_not(gold, seed):
    failures, decided = [], 0
    for writing in writings(gold, random.Random(seed)):
        found = grade_plainly(writing.text, gold)
        if not isinstance(found, Verdict):
            continue  # algebra has its own tests
        decided += 1
        if (found.grade is Grade.CORRECT) != writing.right:
            failures.append((writing, found))
    assert not failures
    assert decided >= 20


separators = st.text("#?;:|&~@!,._=<> \n", max_size=5) | st.sampled_from(
    [r"\cup", r"\notin", r"\neq", " or ", " and ", r"\text{ or }", r"\to", r"\quad", "not", "vs"]
)


@given(st.integers(0, 10**4), st.integers(200, 999), separators)
@settings(deadline=None, max_examples=400)
def test_no_number_opens_what_stands_behind_another(gold, other, separator):
    if str(other) in str(gold):
        return
    answer = f"{other}{separator}{gold}"
    if value(answer.strip()) == gold:
        return
    assert verdict(answer, str(gold)).grade is not Grade.CORRECT


@given(st.fractions(-99, 99, max_denominator=99), st.integers(1, 10**9))
@settings(deadline=None, max_examples=200)
def test_there_is_no_tolerance(number, large):
    near = number + Fraction(1, 10**9 + large)
    for unit in ("", " m", r"\text{ J}"):
        answer = f"{near.numerator}/{near.denominator}{unit}" if near > 0 else "0.0" + unit
        right = Fraction(0) == number and near <= 0
        gold = f"{number.numerator}/{number.denominator}"
        assert (verdict(answer, gold).grade is Grade.CORRECT) == right


@given(st.text(max_size=40), st.sampled_from(["42", r"\text{(C)}", "1,-2", r"3\sqrt{13}", "(2,4)"]))
@settings(deadline=None, max_examples=400)
def test_no_text_makes_the_rules_raise(text, gold):
    found = grade_plainly(text, gold)
    assert isinstance(found, Verdict) or len(found) == 2


KINDS = [
    ("42", "42", Kind.NUMBER),
    ("18 eggs", "18", Kind.QUANTITY),
    ("C)", r"\text{(C)}", Kind.CHOICE),
    ("an ellipse", r"\text{ellipse}", Kind.TEXT),
    ("-2 and 1", "1,-2", Kind.SET),
    ("(1, 2, 3)", "(1,2,3)", Kind.TUPLE),
    ("x > 2", r"(2,\infty)", Kind.INTERVAL),
    ("2x - y + 3 = 0", "y = 2x + 3", Kind.EQUATION),
    (r"\sqrt{117}", r"3\sqrt{13}", Kind.MATHEMATICS),
    ("6^2 + 6", "42", Kind.NUMBER),
    (r"\int_0^1 x dx", r"\int_0^1 x dx", Kind.TEXT),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("answer", "gold", "kind"), KINDS)
def test_the_kind_of_a_comparison(answer, gold, kind):
    assert verdict(answer, gold) == Verdict(Grade.CORRECT, kind)


EXPRESSIONS = [  # the gold, what is equal, what is not
    ("3R^2", ["3 R R", r"3 \cdot R^{2}"], ["3r^2", "3R^3", "3R_2", "3R^2 x"]),
    ("x_1 + y'", ["y' + x_{1}", r"y^{\prime}+x_1"], ["x_2 + y'", "x_1 + y", "x_1 + y''"]),
    (r"\frac{1}{\sqrt{2}} c", [r"\frac{\sqrt2}{2}c", "c/√2"], ["0.7071 c", r"\frac{C}{\sqrt{2}}"]),
    ("2.2 \\tau", [r"\frac{11}{5}\tau", "2.20 τ"], [r"\ln(9) \tau", "2.2 t"]),
    ("e^{-2t}", ["exp(-2t)", r"\frac{1}{e^{2t}}"], ["e^{2t}", "E^{-2t}"]),
    ("-2+2 \\sqrt{3} i", ["2i\\sqrt{3} - 2", r"-2 + 2\sqrt{3}\mathrm{i}"], ["-2 + 2\\sqrt{3}"]),
    (r"\hbar \omega(v+1 / 2)-E", [r"\hbar\omega v + \hbar\omega/2 - E"], ["2", "1/2"]),
    (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", [r"(E_1 + 2E_2)/3"], ["2/3", r"\frac{2}{3} E_2"]),
    ("\\frac{1}{m} t", ["t/m"], [r"\frac{1}{m}", "m/t"]),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "equal", "other"), EXPRESSIONS)
def test_expressions_by_their_letters(gold, equal, other):
    assert [verdict(answer, gold).grade for answer in equal] == ["correct"] * len(equal)
    assert "correct" not in [verdict(answer, gold).grade for answer in other]


@pytest.mark.parametrize(
    ("gold", "other"),
    [
        (r"\frac{dM}{dt}=k M^{6}", r"\frac{dM}{dt}=0"),
        ("y^{\\prime}+r y-r x(t)=0", "0=0"),
        ("m \\frac{d v}{d t}+b v=f", "m+b=f"),
        ("X_{d}=125-1.25 P", "X_{d}=125"),
    ],
)
def test_differential_equations_are_no_zeros(gold, other):
    assert verdict(gold, gold) == (Grade.CORRECT, Kind.EQUATION)
    left, right = gold.split("=")
    assert verdict(f"{right} = {left}", gold).grade is Grade.CORRECT
    assert verdict(other, gold).grade is not Grade.CORRECT
    assert verdict("0", gold).grade is not Grade.CORRECT


ONE, TWO, X = number(1), number(2), Node("symbol", ("x",))


@pytest.mark.smoke
def test_trees_by_hand():
    def tree(text, **options):
        return read(text, units=False, **options)

    assert tree("x + 1") == Node("sum", (X, ONE))
    assert tree("2x") == tree(r"2 \cdot x") == Node("product", (TWO, X))
    assert tree("1/2") == tree(r"\frac12") == Node("product", (ONE, Node("reciprocal", (TWO,))))
    assert tree(r"1 \pm x").kind == "members" and len(tree(r"1 \pm x").args) == 2
    assert tree("(1, 2)") == Node("tuple", (ONE, TWO))
    assert tree("[1, 2)") == Node("interval", (ONE, TWO, True, False))
    assert tree("x > 2") == Node("union", ((Node("interval", (TWO, INFINITY, False, False)),), "x"))
    assert tree("x = 58,500") == Node("equation", (X, number(58_500)))
    assert tree(r"(2, \infty]") is None or tree(r"(2, \infty]").kind == "interval"
    assert tree(r"0.\overline{72}") == number(Fraction(8, 11))
    assert tree("52_8") == Node("based", ("", "52", 8))
    assert tree(r"7 \times 9").kind == "dimensions"
    for refused in (
        "43 42", "43 # 42", r"\int x", "words", "2 +", "(1", "x 2", r"\not= 2", "a/2b", "3^2^1",
        r"\frac{d}{dx}(x^2)", "1e5000", "1e-401", "9" * 301, "(" * 41 + "1" + ")" * 41, "x" * 401,
        r"\deriv{0}", r"\deriv8", "42 xyzw", "n!!",
    ):  # fmt: skip
        assert tree(refused) is None, refused


@pytest.mark.smoke
def test_quantities_by_hand():
    def unit(text):
        return read(text, units=True).args[1]

    assert read("13.1 K", units=True).args[0] == number(Fraction(131, 10))
    assert unit("13.1 K") == Unit((("temperature", 1),))
    assert unit("5 square inches") == unit("5 in^2") == unit("5 in2") == unit("5 sq in")
    assert unit("5 in^2").size == Fraction(127, 5000) ** 2
    assert unit("90 km/h") == unit("25 km per hour") and unit("3 m/s").powers == (
        ("length", 1),
        ("time", -1),
    )
    assert unit("7 eggs") == Unit((("noun egg", 1),), nouns=frozenset(("egg",)))
    assert read("42 dozen", units=True) is None
    assert read("42 dozen", units=True, nouns=frozenset(("dozen",))).kind == "quantity"
    assert read("5 m", units=False).kind == "product", "a variable"


@pytest.mark.smoke
def test_spelling_by_hand():
    assert normalise_spelling("The answer is $\\boxed{42}$.") == "42"
    assert normalise_spelling("½") == r"\frac{1}{2}"
    assert normalise_spelling("90°") == normalise_spelling(r"90^{\circ}") == r"90^\circ"
    assert normalise_spelling("4\u200b2") == "42"
    assert (
        normalise_spelling("42}")
        is normalise_spelling("43 \\fbox{42}")
        is normalise_spelling("")
        is None
    )
    assert as_words(r"\text{ The East }") == "east" and as_words("x") is None


def test_shapes_of_golds():
    golds = {"18": "number", r"\$36": "quantity", r"\text{(C)}": "choice", "52_8": "base",
             r"(2,\infty)": "interval", "(2,4)": "tuple", "1,-2": "list", "y = 2x": "equation",
             r"\text{east}": "word", r"3\sqrt{13}": "mathematics", "8:15": "other"}  # fmt: skip
    assert {gold: shape(gold) for gold in golds} == golds


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"5 \text{ m}", ["5", "5 m", "5 meters", "5 metres", r"5\text{ meters}"], ["5 s", "5m^2"]),
        (r"13.1 \text{ J}", ["13.1", "13.1 joules", r"13.1\ \mathrm{J}"], ["13.1 N"]),
        (r"5 \mathrm{ m}^2", ["5", "5 m^2", "5 square meters"], ["5 m"]),
        (r"\frac{1}{2}\text{ s}", ["0.5", "1/2 seconds"], ["1/2 h"]),
        ("5 m", ["5 m"], ["5", "5 n"]),  # without markup it is a variable
    ],
)
def test_a_unit_of_one_letter_that_is_set_as_text_is_a_unit(gold, right, wrong):
    with Grader() as grader:
        verdicts = {
            text: grader.judge_answers([text], [gold])[0].grade for text in (gold, *right, *wrong)
        }
    assert {text for text, found in verdicts.items() if found == "correct"} == {gold, *right}


@pytest.mark.parametrize("answer, gold, right", [
    ("_{6}P_2", "30", True), ("_{6}P_2", "15", False), ("_{6}C_2", "15", True),
])  # fmt: skip
def test_permutations_and_combinations_are_numbers(answer, gold, right):
    assert (verdict(answer, gold).grade is Grade.CORRECT) is right
