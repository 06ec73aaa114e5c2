"""Problems in other words: by hand, and that the threshold separates paraphrases from strangers."""

import json

import pytest

from sage_unsloth.models.embedded import data_folder
from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.problems.near_copies import NEAR, best_scores, near_copies, words_and_numbers

# ruff: noqa: E501 (problems as they are written)
# A problem, and the same one as somebody else would tell it.
PAIRS = (
    (
        "A baker packs 24 rolls into each of 15 boxes and sells a box for $6. How much does she earn?",
        "Each box holds twenty-four rolls. If fifteen boxes are packed and sold at 6 dollars a box, "
        "what are the earnings of the baker?",
    ),
    (
        "Two trains leave stations that are 1,200 km apart at speeds of 80 and 70 km/h towards each "
        "other. After how many hours do they meet?",
        "The distance between two stations is 1200 km. One train leaves each station at the same "
        "time; their speeds are 70 km/h and 80 km/h. When do the trains meet?",
    ),
    (
        "A tank is filled by one pipe in 3 hours and emptied by another in 5 hours. With both pipes "
        "open, how long does an empty tank take to fill?",
        "One pipe can fill a tank in three hours, a second pipe can empty the tank in five. The tank "
        "is empty and both pipes are opened: after how long is it full?",
    ),
    (
        "Lena reads 30 pages a day and her book has 420 pages. How many weeks does she need?",
        "A book of 420 pages is read by Ali at thirty pages per day; for how many weeks does he read?",
    ),
    (
        "Find the remainder when the sum of the squares of the first 50 odd integers is divided by 7.",
        "The squares of the first fifty odd integers are summed. What remainder does the sum leave "
        "after division by 7?",
    ),
    (
        "A square garden of side 18 m has a path 2 m wide around it on the outside. What is the area "
        "of the path?",
        "Around a garden in the shape of a square with sides of 18 m, a path of width 2 m is laid on "
        "its outside. Compute the path's area.",
    ),
)  # fmt: skip


def benchmark(texts):
    rows = [{"id": f"p{i}", "problem": text, "answer": "1"} for i, text in enumerate(texts)]
    return Benchmark(name="toy", rows=rows, provenance=[])


def test_words_and_numbers_by_hand():
    words, numbers = words_and_numbers(
        r"She bought 1,000 boxes of \textbf{rolls}, twenty-five cups, three hundred plates and .5 l"
    )
    assert numbers == {1000, 25, 300, 0.5}
    assert words == {"bought", "box", "roll", "cup", "plat", "l"}
    assert words_and_numbers("1000 ROLL and one thousand rolls") == ({"roll"}, {1000})


def test_a_score_by_hand():
    # Of three texts "cat" is in all and weighs 1 + log(4/4), "dog" and "owl" are in two.
    ((score, place),) = best_scores(["cat dog owl 5 7"], ["cat owls", "a dog, 5 cats"])
    assert place == 1
    cat, dog, owl = 1, 1.28768, 1.28768  # "owls" is "owl" with an ending
    assert score == pytest.approx((cat + dog) / (cat + dog + owl) * 1 / 2, abs=1e-4)


def test_paraphrases_by_hand_are_found_and_nothing_else():
    originals, told = zip(*PAIRS, strict=True)
    for problems, training in ((originals, told), (told, originals)):
        rows = [{"problem": text} for text in training]
        found = near_copies(rows, benchmark(problems))
        assert [(row["id"], row["training_row"]) for row in found] == [
            (f"p{i}", i) for i in range(len(PAIRS))
        ]
        assert found[0]["training_problem"] == training[0]
        for i, text in enumerate(problems):
            others = [row for place, row in enumerate(rows) if place != i]
            assert not near_copies(others, benchmark([text])), text


def test_other_numbers_make_another_problem():
    text = PAIRS[0][0]
    other = text.replace("24", "36").replace("15", "11").replace("$6", "$9")
    assert near_copies([{"problem": text}], benchmark([text]))
    assert not near_copies([{"problem": text}], benchmark([other]))


def test_the_measured_threshold_is_the_one_in_use():
    result = json.loads((data_folder() / "results" / "overlap" / "near_copies.json").read_text())
    (row,) = [row for row in result["thresholds"] if row["threshold"] == NEAR]
    assert row["recall"] >= 0.95 and row["precision"] >= 0.95 and row["false_alarms"] < 0.005


def test_a_bad_threshold_is_refused():
    with pytest.raises(ValueError, match=r"must be in \(0, 1\], got 0"):
        near_copies([], benchmark(["x"]), threshold=0)
