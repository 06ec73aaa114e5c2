"""Answers that are refused before a worker sees them, and those that are not."""

import time

import pytest

from sage_unsloth.grading.checker import Grade, Kind, Verdict
from sage_unsloth.grading.cost import costs_too_much
from sage_unsloth.grading.mathematics import grade_plainly

GOLD = r"\sqrt{2}+x"
ENDLESS = [
    r"10^{10^{10}}",
    "9^{9^{9}}",
    "2^{3^{4^{5}}}",
    "10^{99999999}",
    r"\frac{1}{7^{99999999}}",
    "1.000001^{1e9}",
    "123456789^{12345678}",
    r"\lfloor e^{e^{50}} \rfloor",
    r"\sin(10^{10^8})",
    "(x+y+z+1)^{200}",
    "x^{" * 40 + "2" + "}" * 40,
    "(" * 200 + "1" + ")" * 200,
    "-" * 1500 + "1",
    r"\tan(" * 10 + "x" + ")" * 10,
    "2^{(10!)}",
    "x^{(9)^{9}}",
]
ORDINARY = [
    r"3\sqrt{13}",
    r"e^{x^2}",
    r"e^{-x^2/2}",
    "2^{100}",
    "x^{2n+1}",
    "(x+1)^{10}",
    r"\frac{1}{\sqrt{1+\frac{1}{\sqrt{2}}}}",
    r"\sin^2(x)+\cos^2(x)",
    "1 - (-2)",
    r"6.02 \cdot 10^{23}",
]


@pytest.mark.parametrize("answer", ENDLESS, ids=lambda text: text[:20])
def test_what_may_take_for_ever_is_refused_at_once(answer):
    started = time.process_time()
    assert costs_too_much(answer, GOLD)
    assert grade_plainly(answer, GOLD) == Verdict(Grade.WRONG, Kind.REFUSED)
    assert time.process_time() - started < 0.2
    assert not costs_too_much(answer, answer), "as much as its gold has"


@pytest.mark.parametrize("answer", ORDINARY)
def test_what_people_write_is_not(answer):
    assert not costs_too_much(answer, GOLD)


@pytest.mark.parametrize("piece", ["^", "^{", "{", "}", "9^{", "-", r"\sin", "x^2"])
def test_it_is_quick_on_any_text(piece):
    started = time.process_time()
    costs_too_much(piece * (2_000 // len(piece)), "42")
    assert time.process_time() - started < 1
