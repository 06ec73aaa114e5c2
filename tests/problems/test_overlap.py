"""Training sets as `evaluate --train` reads them, to look for in a benchmark."""

import json

import pytest

from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.problems.overlap import overlap, training_problems

TEXT = "Tom has 3 red apples and buys 4 green ones at the market."
TURNS = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "7"},
]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"problem": TEXT},
        {"question": TEXT, "answer": "3 + 4 = 7\n#### 7"},  # as of GSM8K
        {"prompt": TEXT, "solution": "7"},  # as of DAPO
        {"messages": TURNS},
        {"conversation": TURNS[:2]},
        {"prompt": TURNS[1:2], "answer": "7"},
    ],
    ids=lambda row: next(iter(row)),
)
def test_problems_are_found_by_their_column(tmp_path, row):
    training = training_problems(written(tmp_path / "train.jsonl", [row, row]))
    assert [found["problem"] for found in training] == [TEXT, TEXT]
    rows = [{"id": "b/0", "problem": TEXT}, {"id": "b/1", "problem": "What is 2 + 2?"}]
    benchmark = Benchmark(name="b", rows=rows, provenance=[])
    assert [found["id"] for found in overlap(training, benchmark)] == ["b/0"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": TEXT}],
            r"as text \(problem, question, prompt\) or as turns .* has text",
        ),
        ([{"problem": 7}], "must be non-empty text, but row 0 of .* has 7"),
        ([{"question": TEXT}, {"question": " "}], "must be non-empty text, but row 1 of"),
        ([], "a training set must have rows, .*train.jsonl has none"),
    ],
)
def test_what_is_no_training_set_is_refused_by_the_options_name(tmp_path, rows, message):
    with pytest.raises(ValueError, match=rf"^--train FILE: .*{message}"):
        training_problems(written(tmp_path / "train.jsonl", rows))
