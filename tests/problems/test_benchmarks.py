"""Loaders on small files in the hub's own columns, counts, what is refused, and the overlap
report.
"""

import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from sage_unsloth.grading.checker import Checker, Grade, Kind, Verdict
from sage_unsloth.grading.checkers import ROLES, roles
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.problems import arithmetic, sources
from sage_unsloth.problems.benchmarks import Benchmark, check_golds, load_benchmark
from sage_unsloth.problems.overlap import overlap
from sage_unsloth.problems.published import PUBLISHED
from sage_unsloth.problems.sources import Source


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def aime24(count=30):
    return [
        {
            "id": 60 + i,
            "problem": f"What is {i} plus {i}?",
            "solution": "...",
            "answer": f"{2 * i:03}",
            "url": "u",
            "year": "2024",
        }
        for i in range(count)
    ]


def math500(count=500, hard=134):
    return [
        {
            "problem": f"Halve {i}.",
            "solution": rf"It is \boxed{{\frac{{{i}}}{{2}}}}.",
            "answer": rf"\frac{{{i}}}{{2}}",
            "subject": "Algebra",
            "level": 5 if i < hard else 1 + i % 4,
            "unique_id": f"test/algebra/{i}.json",
        }
        for i in range(count)
    ]


def knights(people, count=100):
    names = ["Ann", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal"][:people]
    return [
        {
            "quiz": f"A very special island is inhabited only by knights and knaves ({i}).",
            "names": names,
            "knight_knave": {"knight": "knight"},
            "solution": [(i >> p) % 2 == 0 for p in range(people)],
            "solution_text": ", and ".join(
                f"{n} is a {'knight' if (i >> p) % 2 == 0 else 'knave'}"
                for p, n in enumerate(names)
            )
            + ".",
        }
        for i in range(count)
    ]


def test_aime_answers_are_integers_without_zeros(tmp_path):
    benchmark = load_benchmark("aime24", write(tmp_path / "copy.jsonl", aime24()))
    assert [row["answer"] for row in benchmark.rows] == [str(2 * i) for i in range(30)]
    assert benchmark.rows[3] == {
        "id": "aime24/63",
        "problem": "What is 3 plus 3?",
        "answer": "6",
        "source": "copy.jsonl",
    }
    assert benchmark.provenance[0]["rows"] == 30 and len(benchmark.provenance[0]["sha256"]) == 64
    with Grader() as grader:
        assert grader.grade_many(["<SOLUTION>006</SOLUTION>"], [benchmark.rows[3]["answer"]]) == [
            "correct"
        ]


def test_columns_of_each_benchmark(tmp_path):
    amc = [{"question": f"Q{i}?", "answer": float(i - 1), "url": "u"} for i in range(40)]
    rows = load_benchmark("amc23", write(tmp_path / "amc23.jsonl", amc)).rows
    assert [row["answer"] for row in rows[:3]] == ["-1", "0", "1"] and rows[0]["id"] == "amc23/0"
    minerva = [
        {"problem": f"P{i}", "solution": rf"First \boxed{{1}}, so \boxed{{\frac{{{i}}}{{7}}}}."}
        for i in range(272)
    ]
    rows = load_benchmark("minerva", write(tmp_path / "minerva.jsonl", minerva)).rows
    assert rows[5]["answer"] == r"\frac{5}{7}"
    gsm = [
        {"question": f"Q{i}", "answer": f"Work 5 #### of it.\n#### {1000 + i:,}"}
        for i in range(1319)
    ]
    rows = load_benchmark("gsm8k", write(tmp_path / "gsm8k.jsonl", gsm)).rows
    assert rows[7]["answer"] == "1007"
    file = write(tmp_path / "math500.jsonl", math500())
    assert len(load_benchmark("math500", file).rows) == 500
    hard = load_benchmark("math500-l5", file).rows
    assert len(hard) == 134 and {row["level"] for row in hard} == {5}
    assert hard[1]["id"] == "math500-l5/test/algebra/1.json"


def test_knights_and_knaves(tmp_path):
    three = load_benchmark("knights-and-knaves:3", write(tmp_path / "k.jsonl", knights(3)))
    row = three.rows[1]
    assert row["answer"] == "Ann is a knave, Bo is a knight, Cy is a knight" and row["level"] == 3
    assert (
        row["problem"].startswith("A very special island") and "`NAME is a knave`" in row["problem"]
    )
    assert three.checker is ROLES
    everyone = [row for people in range(2, 9) for row in knights(people)]
    file = write(tmp_path / "all.jsonl", everyone)
    assert len(load_benchmark("knights-and-knaves", file).rows) == 700
    assert {len(roles(r["answer"])) for r in load_benchmark("knights-and-knaves:5", file).rows} == {
        5
    }
    liar = knights(2)
    liar[4]["solution"] = [not honest for honest in liar[4]["solution"]]
    with pytest.raises(ValueError, match=r"row 4 of knights-and-knaves:2 .*`solution` says"):
        load_benchmark("knights-and-knaves:2", write(tmp_path / "liar.jsonl", liar))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_folder_of_copies_and_every_suffix(tmp_path, suffix):
    rows = knights(2)
    file = tmp_path / f"knights-and-knaves:2{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        write(file, rows)
    assert (
        load_benchmark("knights-and-knaves:2", tmp_path).rows[0]["answer"]
        == "Ann is a knight, Bo is a knight"
    )


def test_aime_is_both_years(tmp_path):
    write(tmp_path / "aime24.jsonl", aime24())
    with pytest.raises(
        ValueError, match=r"aime25 must be in .* as one of aime25\.jsonl, .*there is none"
    ):
        load_benchmark("aime", tmp_path)
    write(tmp_path / "aime25.jsonl", [{"question": f"Q{i}", "answer": str(i)} for i in range(30)])
    both = load_benchmark("aime", tmp_path)
    assert len(both.rows) == len({row["id"] for row in both.rows}) == 60
    assert both.rows[30]["id"] == "aime25/0" and len(both.provenance) == 2
    file = write(tmp_path / "one.jsonl", [{"problem": f"Q{i}", "answer": i} for i in range(60)])
    assert len(load_benchmark("aime", file).rows) == 60


def test_from_the_hub_with_pinned_revisions(monkeypatch):
    """The parts are asked for as the hub names them; what they hold comes from here."""
    asked = []

    def from_hub(source):
        asked.append((source.hub_id, source.config, source.split, source.revision))
        return [{"question": f"Q{i}", "answer": str(i)} for i in range(15)], "abc"

    monkeypatch.setattr(sources, "_from_hub", from_hub)
    benchmark = load_benchmark("aime25")
    assert asked == [
        ("opencompass/AIME2025", f"AIME2025-{part}", "test", None) for part in ("I", "II")
    ]
    assert [p["revision"] for p in benchmark.provenance] == ["abc", "abc"]
    assert benchmark.rows[20]["id"] == "aime25/20"
    with pytest.raises(
        ValueError, match=r"HuggingFaceH4/MATH-500 \(test\) must have 500 rows, got 15"
    ):
        load_benchmark("math500")
    assert asked[-1] == (
        "HuggingFaceH4/MATH-500",
        None,
        "test",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    )
    with pytest.raises(ValueError, match=r"must have 100 rows, got 15"):
        load_benchmark("knights-and-knaves:4")
    assert asked[-1][:3] == ("K-and-K/knights-and-knaves", "test", "4ppl")


def test_every_published_count():
    counts = {name: spec.num_rows for name, spec in PUBLISHED.items()}
    assert {name: n for name, n in counts.items() if ":" not in name} == {
        "aime24": 30,
        "aime25": 30,
        "amc23": 40,
        "math500": 500,
        "math500-l5": 134,
        "minerva": 272,
        "gsm8k": 1319,
        "knights-and-knaves": 700,
    }
    for spec in PUBLISHED.values():
        assert all(isinstance(source, Source) for source in spec.sources)


def test_a_benchmark_in_its_two_published_files(tmp_path):
    """AIME 2025 is published as I and II; neither of them has the problems of the other."""
    files = []
    for part in ("I", "II"):
        files.append(tmp_path / f"aime2025-{part}.jsonl")
        rows = [{"question": f"{part}: {n}?", "answer": str(n)} for n in range(15)]
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_benchmark("aime25", ",".join(map(str, files)))
    assert [row["problem"] for row in found.rows][::15] == ["I: 0?", "II: 0?"]
    assert len({row["id"] for row in found.rows}) == 30
    assert [source["file"] for source in found.provenance] == [file.name for file in files]
    with pytest.raises(ValueError, match="aime25 must have 30 problems, got 15"):
        load_benchmark("aime25", files[0])
    with pytest.raises(ValueError, match=r"there is none at none\.jsonl"):
        load_benchmark("aime25", f"{files[0]},none.jsonl")


def test_the_embedded_task_and_a_file_of_ones_own(tmp_path):
    assert load_benchmark("arithmetic").rows == arithmetic.problems("test")
    rows = [
        {"problem": "1+1=?", "answer": 2},
        {"question": "2+2=?", "answer": "4", "id": "b", "level": "easy"},
    ]
    mine = load_benchmark("mine", write(tmp_path / "any.jsonl", rows))
    assert mine.rows == [
        {"id": "mine/0", "problem": "1+1=?", "answer": "2", "source": "any.jsonl"},
        {"id": "mine/b", "problem": "2+2=?", "answer": "4", "source": "any.jsonl", "level": "easy"},
    ]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("aime24", aime24(29), "aime24 must have 30 problems, got 29 from .*Give the whole file"),
        ("math500-l5", math500(hard=133), "math500-l5 must have 134 problems, got 133"),
        (
            "mine",
            [{"prompt": "P", "label": "1"}],
            "rows need a column for answer, .* has prompt, label. Name it: --columns",
        ),
        ("mine", [{"problem": "P", "answer": None}], "saw the columns"),
        ("mine", [{"problem": " ", "answer": "1"}], "needs text in `problem`"),
        ("mine", [{"problem": "P", "solution": "no box"}], "needs text"),
        ("mine", [{"problem": "P", "answer": "1", "id": 7}] * 2, "1 of 2 repeat"),
        ("mine", [], "must have rows"),
        (
            "knights-and-knaves",
            [{"quiz": "Q"}],
            r"needs the columns \['names', 'quiz', 'solution'\], but saw \['quiz'\]",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path, name, rows, message):
    with pytest.raises(ValueError, match=message):
        load_benchmark(name, write(tmp_path / "file.jsonl", rows))


def test_an_unknown_name_is_refused():
    with pytest.raises(
        ValueError,
        match=r"a benchmark is one of aime24, .*reasoning-gym:TASK, or NAME=FILE .*got 'nope'",
    ):
        load_benchmark("nope")


def test_no_benchmark_is_refused_for_its_golds(tmp_path):
    answers = [r"\frac{1}{2}", "?", "an ellipse", r"\frac{", "12:30", r"\int_0^1 x dx"]
    rows = [{"problem": "P", "answer": answer} for answer in answers]
    benchmark = load_benchmark("mine", write(tmp_path / "a.jsonl", rows))
    with Grader() as grader:
        listed = check_golds(benchmark, grader)
        own = grader.grade_answers(answers, answers)
    assert own == ["correct"] * 6
    assert [(row["id"], row["why"]) for row in listed] == [
        (f"mine/{number}", "compared as text") for number in (1, 3, 4, 5)
    ]
    with Grader(checker=get_verifier("text")) as grader:
        assert check_golds(replace(benchmark, checker=grader.checker), grader) == []
    long = [{"problem": "P", "answer": "x + " * 600 + "x"}]  # longer than an answer may be
    with Grader() as grader:
        (found,) = check_golds(load_benchmark("long", write(tmp_path / "b.jsonl", long)), grader)
    assert found["why"] == "not right for itself"
    never = Checker(
        name="never", version=1, plainly=lambda answer, gold: Verdict(Grade.WRONG, Kind.TEXT)
    )
    with Grader(checker=never) as grader:
        listed = check_golds(benchmark, grader)
    assert {row["why"] for row in listed} == {"not right for itself"} and len(listed) == 6
    countdown = replace(benchmark, checker=get_verifier("countdown"))
    with Grader() as grader, pytest.raises(ValueError, match="mine/0: a gold of countdown must be"):
        check_golds(countdown, grader)


def test_a_gold_that_is_no_integer_is_listed(tmp_path):
    rows = [*aime24(29), {"problem": "P", "answer": "1/2"}]
    benchmark = load_benchmark("aime24", write(tmp_path / "a.jsonl", rows))
    with Grader() as grader:
        (listed,) = check_golds(benchmark, grader)
    assert (listed["gold"], listed["why"]) == ("1/2", "no integer")


@pytest.mark.smoke
def test_overlap_by_hand():
    rows = [
        {"id": "same", "problem": "One two three four five!"},
        {"id": "part", "problem": "zero one, TWO three four six"},
        {"id": "short", "problem": "three four"},
        {"id": "none", "problem": "one two three five four"},
        {"id": "empty", "problem": "?!"},
    ]
    benchmark = Benchmark(name="b", rows=rows, provenance=[])
    training = [{"problem": "one two three four five"}, {"problem": "six"}]
    assert overlap(training, benchmark, n=4) == [
        {"id": "same", "shared": 1.0, "words": "one two three four"},
        {"id": "part", "shared": 1 / 3, "words": "one two three four"},
        {"id": "short", "shared": 1.0, "words": "three four"},
    ]
    assert overlap([], benchmark) == []
    with pytest.raises(ValueError, match="n must be >= 1"):
        overlap(training, benchmark, n=0)


def test_the_embedded_test_split_is_not_in_its_training_split():
    training = arithmetic.problems("train") + arithmetic.problems("sft")
    assert overlap(training, load_benchmark("arithmetic")) == []
