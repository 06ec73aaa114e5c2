"""The sums that SmolLM2 is asked: what its study trains on and measures."""

import pytest

from research.smollm2 import PROMPT, SIZES, problems, working


def test_no_problem_is_in_two_splits():
    ids = [row["id"] for split in SIZES for row in problems(split)]
    assert len(ids) == len(set(ids)) == sum(SIZES.values())


@pytest.mark.parametrize(
    "problem, split, expected",
    [
        ("23 - 68 = ?", False, r"23-68=\boxed{-45}"),
        ("23 - 68 = ?", True, r"23-60=-37;-37-8=\boxed{-45}"),
        ("77 + 50 = ?", True, r"77+50=\boxed{127}"),  # without units there is nothing to split
    ],
)
def test_the_two_ways_of_working(problem, split, expected):
    assert working(problem, split) == expected


def test_every_solution_ends_with_its_answer():
    for row in problems("sft"):
        assert row["solution"].endswith(f"=\\boxed{{{row['answer']}}}")
        assert PROMPT.taught(row) == row["solution"]
        for equation in row["solution"].split(";"):
            left, right = equation.split("=")
            assert eval(left) == int(right.removeprefix("\\boxed{").removesuffix("}"))


def test_a_family_is_what_makes_a_problem_hard():
    for row in problems("train"):
        kind = "negative" if int(row["answer"]) < 0 else "minus"
        assert row["family"] == ("plus" if "+" in row["id"] else kind)
