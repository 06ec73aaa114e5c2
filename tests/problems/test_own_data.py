"""Data sets of one's own: columns by name, the answer by a pattern, what is refused before a model
is loaded.
"""

import argparse
import hashlib
import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sage_unsloth.evaluation.evaluator import check_columns_are_used
from sage_unsloth.grading.checkers import REASONING_GYM, ROLES
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.problems import own_data
from sage_unsloth.problems.benchmarks import load_benchmark
from sage_unsloth.problems.columns import Columns, parse_columns
from sage_unsloth.problems.corpora import rl_rows, sft_rows
from sage_unsloth.problems.options import prompt_option
from sage_unsloth.problems.sources import Source, read_file
from sage_unsloth.prompts import PROJECT_PROMPT, prompt_format

HASHES = "#### (.+)"
GSM8K = [  # in the form of GSM8K
    {
        "question": f"A box has {n} pens. How many have {n} boxes?",
        "answer": f"Multiply.\nThat is {n}*{n} = <<{n}*{n}={n * n}>>{n * n} pens.\n#### {n * n:,}",
    }
    for n in range(2, 42)
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def gsm8k(tmp_path):
    return write(tmp_path / "gsm.jsonl", GSM8K)


def test_the_answer_is_taken_out_by_a_pattern(gsm8k):
    found = rl_rows(data=gsm8k, columns=Columns(answer_pattern=HASHES), limit=None)
    assert found.rows[0] == {"problem": "A box has 2 pens. How many have 2 boxes?", "answer": "4"}
    assert found.rows[-1]["answer"] == "1,681"
    assert found.counts == {
        "rows": 40,
        "answer pattern matches": 40,
        "has an answer": 40,
        "answer can be graded": 40,
    }
    assert found.provenance["answer_pattern"] == HASHES and len(found.provenance["sha256"]) == 64


def test_a_system_prompt_is_a_text_or_a_file_of_one(tmp_path):
    def asked(text):
        return prompt_option(argparse.Namespace(system_prompt=str(text), tags=["boxed"])).system

    file = tmp_path / "prompt.txt"
    file.write_text("Add the numbers.\n")
    assert asked(file) == asked("Add the numbers.") == "Add the numbers."
    assert asked("Add them. " * 40) == "Add them. " * 40, "longer than the name of a file may be"
    with pytest.raises(ValueError, match=r"but there is no file .*other\.txt"):
        asked(tmp_path / "other.txt")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be text, or a file of text, got"):
        asked(file)


def test_the_record_says_where_rows_are_from_and_what_each_filter_left(gsm8k):
    columns = Columns(names={"problem": "question"}, answer_pattern=HASHES)
    found = rl_rows(data=gsm8k, columns=columns, limit=30)
    digest = hashlib.sha256(Path(gsm8k).read_bytes()).hexdigest()
    record = found.record(gsm8k)
    assert record == {
        "path": gsm8k,
        "file": "gsm.jsonl",
        "sha256": digest,
        "rows": 40,
        "columns": {"problem": "question", "answer": "answer"},
        "answer_pattern": HASHES,
        "filters": found.counts,
    }
    assert record["filters"]["first 30"] == 30
    assert found.origin() == (
        f"Data: gsm.jsonl; sha256 {digest[:12]}; problem=question, answer=answer"
    )
    assert "path" not in found.record(), "only where it is told"
    taught = sft_rows(data=gsm8k, columns=parse_columns(["solution=answer"], HASHES))
    assert taught.record()["columns"] == {
        "problem": "question",
        "answer": "answer",
        "solution": "answer",
    }
    assert rl_rows(data="arithmetic").origin() == "Data: arithmetic, split train"


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_takes_a_row_at_least(gsm8k, limit):
    with pytest.raises(ValueError, match=rf"limit must be >= 1, got {limit}. Leave --limit out"):
        rl_rows(data=gsm8k, columns=Columns(answer_pattern=HASHES), limit=limit)


def test_the_remedy_is_for_the_filter_that_left_nothing(tmp_path):
    file = write(tmp_path / "empty.jsonl", [{"problem": "1+1=?", "answer": ""}] * 3)
    with pytest.raises(ValueError, match=r"'has an answer' asks, name another column \(--columns"):
        rl_rows(data=file)


def test_sft_teaches_the_working_without_the_answer_behind_it(gsm8k):
    columns = parse_columns(["problem=question", "solution=answer"], HASHES)
    row = sft_rows(data=gsm8k, columns=columns).rows[0]
    assert row["solution"] == "Multiply.\nThat is 2*2 = <<2*2=4>>4 pens." and row["answer"] == "4"


def test_without_a_pattern_a_solution_is_taught_as_it_is(gsm8k):
    row = sft_rows(data=gsm8k, columns=parse_columns(["solution=answer"])).rows[0]
    assert row.keys() == {"problem", "solution"} and row["solution"].endswith("#### 4")


def test_every_filter_is_counted_and_what_it_left_out_is_named(tmp_path):
    rows = [
        {"q": "one", "a": "so #### 1", "s": "w"},
        {"q": "two", "a": "no answer", "s": "w"},
        {"q": "three", "a": None, "s": "w"},
        {"q": "four", "a": "#### 4", "s": ""},
        {"q": "five", "a": "#### 5", "s": "w</SOLUTION>"},
        {"q": "six", "a": "#### 1 #### 6", "s": "w"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    columns = parse_columns(["problem=q", "answer=a", "solution=s"], HASHES)
    found = sft_rows(data=path, columns=columns, prompt=prompt_format(None, ["<s>", "</SOLUTION>"]))
    assert found.counts == {
        "rows": 6,
        "answer pattern matches": 4,
        "has a solution": 3,
        "has an answer": 3,
        "the answer is read from the taught text": 2,
    }
    assert [row["answer"] for row in found.rows] == ["1", "1 #### 6"], "one match, to the end"
    assert found.left_out == {
        "answer pattern matches": ["two", "three"],
        "has a solution": ["four"],
        "the answer is read from the taught text": ["five"],
    }


def test_the_last_match_counts(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"problem": "P", "answer": "= 1, no, = 2"}])
    assert rl_rows(data=path, columns=Columns(answer_pattern=r"= (\d)")).rows[0]["answer"] == "2"


def test_other_columns_are_kept_for_rewards(tmp_path):
    table = pyarrow.table(
        {
            "problem": ["P", "Q"],
            "answer": [27.0, 1.5],
            "tests": [[{"in": "1"}], [{"in": "2"}]],
            "day": [date(2026, 1, 2)] * 2,
            "price": [Decimal("1.50")] * 2,
            "unnamed": ["x", "y"],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    columns = parse_columns(["tests=tests", "day=day", "cost=price"])
    rows = rl_rows(data=str(tmp_path / "rows.parquet"), columns=columns).rows
    assert rows[0] == {
        "problem": "P",
        "answer": "27",
        "tests": [{"in": "1"}],
        "day": "2026-01-02",
        "cost": "1.50",
    }


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([18, -3], ["18", "-3"]),
        ([18, "19", None], ["18", "19", ""]),
        ([float("nan"), 1], ["", "1"]),
        ([[1, 2], {"a": "é"}], ["[1, 2]", '{"a": "é"}']),
        ([True, False], ["true", "false"]),
    ],
)
def test_answers_that_are_no_text_become_text(values, texts):
    raw = [{"problem": "P", "answer": value} for value in values]
    rows = own_data.read_columns(raw, Columns(), ("answer",), "here").rows
    assert [row["answer"] for row in rows] == texts


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": " 2 "},
]


def test_whole_numbers_of_a_column_of_floats_are_whole_and_that_is_logged_once(tmp_path, caplog):
    rows = [{"problem": f"{n}?", "answer": n / 2} for n in range(2, 8)]
    path = write(tmp_path / "rows.jsonl", rows)
    with caplog.at_level("INFO", logger="sage_unsloth"):
        found = rl_rows(data=path).rows
    assert [row["answer"] for row in found] == ["1", "1.5", "2", "2.5", "3", "3.5"]
    assert [r.getMessage() for r in caplog.records].count(
        f"'answer' of {path} has numbers such as 1.0, which are written as whole numbers: 1."
    ) == 1


def test_a_conversation_is_taken_as_it_is(tmp_path):
    asked = [*CHAT, {"role": "user", "content": "and 2+2=?"}]
    path = write(tmp_path / "chat.jsonl", [{"messages": asked, "answer": 4}])
    row = rl_rows(data=path).rows[0]
    assert row == {"problem": "and 2+2=?", "messages": asked, "answer": "4"}
    # Where the column of prompts holds conversations.
    path = write(tmp_path / "trl.jsonl", [{"prompt": asked, "answer": 4}])
    assert rl_rows(data=path).rows[0] == row
    benchmark = load_benchmark("mine", path)
    assert benchmark.rows[0] == row | {"id": "mine/0", "source": "trl.jsonl"}


def test_a_conversation_that_ends_in_its_answer_teaches_it(tmp_path):
    path = write(tmp_path / "chat.jsonl", [{"messages": CHAT}])
    row = sft_rows(data=path).rows[0]
    assert row == {"problem": "1+1=?", "messages": CHAT[:2], "solution": "2"}
    with pytest.raises(ValueError, match=r"rows need a column for answer, .* has messages"):
        rl_rows(data=path)
    row = rl_rows(data=path, answered=False).rows[0]
    assert row == {"problem": "1+1=?", "messages": CHAT[:2]}
    # A column that was not named does not replace the answer.
    path = write(tmp_path / "both.jsonl", [{"messages": CHAT, "solution": "THE COLUMN"}])
    assert sft_rows(data=path).rows[0]["solution"] == "2"
    named = Columns(names={"messages": "messages", "solution": "solution"})
    assert sft_rows(data=path, columns=named).rows[0]["solution"] == "THE COLUMN"


def test_files_as_other_programs_write_them(tmp_path):
    rows = '{"problem": "a", "answer": "1"}\n\n{"problem": "b", "answer": "2"}\n\n'
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    assert len(read_file(path)) == 2
    path.write_text(rows.strip() + '\n{"problem": "c"')
    with pytest.raises(ValueError, match="in line 4 of"):
        read_file(path)
    path = tmp_path / "rows.json"
    path.write_text('\ufeff[{"problem": "a"}]', encoding="utf-8")
    assert read_file(path) == [{"problem": "a"}]
    path = tmp_path / "rows.csv"
    path.write_text(f"problem,answer\n{'x' * 200_000},1\n")
    assert len(read_file(path)[0]["problem"]) == 200_000
    path = write(tmp_path / "half.jsonl", [{"problem": "a\ud83d", "answer": "1"}])
    with pytest.raises(ValueError, match=r"row 0 of .* has half of a character"):
        rl_rows(data=path)


def test_a_benchmark_has_the_same_golds_as_the_training(tmp_path):
    path = write(tmp_path / "o.jsonl", [{"problem": "P", "answer": {"type": "object"}}])
    assert load_benchmark("mine", path).rows[0]["answer"] == '{"type": "object"}'


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of turns"),
        (CHAT[:1], "must end in a user's turn"),
        ([CHAT[1], CHAT[0], CHAT[1]], "a system turn must be the first"),
        ([{"from": "human", "value": "1+1=?"}], "a turn must have a `role`"),
        ([{"role": "tool", "content": "x"}, CHAT[1]], "a turn must have a `role`"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a `content` of text"),
    ],
)
def test_bad_conversations_are_named(tmp_path, messages, message):
    good = {"m": CHAT[:2], "answer": "2"}
    path = write(tmp_path / "chat.jsonl", [good, {"m": messages, "answer": "2"}])
    with pytest.raises(ValueError, match=rf"{message}.*row 1 of .*column 'm'"):
        rl_rows(data=path, columns=parse_columns(["messages=m"]))


@pytest.mark.parametrize(
    ("words", "pattern", "message"),
    [
        (["problem"], None, "--columns takes NAME=COLUMN, each name once"),
        (["problem=a", "problem=b"], None, "each name once"),
        (["completions=a"], None, "a word that is not taken .*, got 'completions'"),
        (["a b=a"], None, "got 'a b'"),
        (["problem=a", "messages=b"], None, "got columns for both"),
        ([], "(", "must be a regular expression, got .*missing"),
        ([], "#### .+", r"must have one group.* with 0. Put brackets around the answer"),
        ([], "(#)(.+)", r"with 2. Put brackets"),
    ],
)
def test_options_that_are_none(words, pattern, message):
    with pytest.raises(ValueError, match=message):
        parse_columns(words, pattern)


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([{"question": "P", "answer": "1"}], ["problem=qestion"], "no 'qestion', only question, "),
        ([{"text": "P", "answer": "1"}], [], r"need a column for problem, .* has text, answer"),
        ([{"problem": "P", "label": "1"}], [], r"a column for answer, .*--columns answer=COLUMN"),
        ([{"problem": 7, "answer": "1"}], [], "text, but row 0 of .* has 7"),
        ([{"problem": "P", "answer": "1"}, {"problem": 7}], [], "row 1 of .* has 7"),
        ([{"problem": " ", "answer": "1"}], [], "a problem must be non-empty text, but row 0"),
        ([{"problem": CHAT, "answer": "1"}], ["problem=problem"], "Give it as messages"),
        ([{"problem": "P", "answer": 1}, {"problem": "Q", "answer": [1]}], [], "of one kind"),
        ([{"problem": "P", "answer": GSM8K[0]["answer"]}], [], "verifier math can use none"),
    ],
)
def test_rows_that_cannot_be_read(tmp_path, rows, columns, message):
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        rl_rows(data=path, columns=parse_columns(columns))


def test_a_pattern_that_never_matches_shows_an_example(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"problem": "P", "answer": "x" * 200 + "= 4"}] * 3)
    with pytest.raises(ValueError, match=r"matches 0 % of the 3 rows .* the first is '… x+= 4'"):
        rl_rows(data=path, columns=Columns(answer_pattern=HASHES))
    path = write(tmp_path / "chat.jsonl", [{"problem": "P", "text": "4"}])
    with pytest.raises(ValueError, match="--answer-pattern needs a column to search"):
        rl_rows(data=path, columns=Columns(answer_pattern=HASHES))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("gsm8", "data must be one of dapo, arithmetic, reasoning-gym:TASK, a file, or OWNER/NAME"),
        ("none.jsonl", "there is none at none.jsonl"),
        ("data/none.csv", "there is none at data/none.csv"),
        ("a/b/c", "data must be a file, a hub id"),
        ("reasoning-gym:sums", "'sums' must be a generator of reasoning-gym"),
        ("openai/gsm9k:main", "openai/gsm9k could not be read from the hub"),
    ],
)
def test_data_that_are_not_there(data, message):
    with pytest.raises(ValueError, match=message):
        rl_rows(data=data)


def test_files_of_another_kind(tmp_path):
    for name, text, message in (
        ("rows.tsv", "problem\tanswer\n1+1=?\t2\n", "must end in one of"),
        ("empty.jsonl", "", "data must have rows, .* has none"),
        ("list.json", "{}", "must hold one list of objects"),
        ("rows.parquet", "problem", "must be a parquet file"),
        ("text.jsonl", "1+1=?\n2\n", "every line must be one JSON object"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            rl_rows(data=str(tmp_path / name))
    with pytest.raises(ValueError, match="is a folder"):
        rl_rows(data=str(tmp_path))


def test_requests_that_contradict_themselves(gsm8k):
    with pytest.raises(ValueError, match="give either --data or --path"):
        rl_rows(data=gsm8k, path=gsm8k)
    with pytest.raises(ValueError, match="dapo has columns of its own"):
        rl_rows(data="dapo", columns=Columns(answer_pattern=HASHES))
    with pytest.raises(ValueError, match="a split is for data of the hub"):
        rl_rows(data=gsm8k, columns=Columns(split="test"))
    with pytest.raises(ValueError, match="which reasoning-gym does not have"):
        sft_rows(data="reasoning-gym:chain_sum")
    with pytest.raises(ValueError, match=r"whose columns are known"):
        check_columns_are_used(["arithmetic", "gsm8k=f.jsonl"], Columns(answer_pattern=HASHES))
    check_columns_are_used(["arithmetic", "mine=f.jsonl"], Columns(answer_pattern=HASHES))


def test_path_with_columns_is_a_file_of_ones_own(gsm8k):
    columns = Columns(answer_pattern=HASHES)
    assert rl_rows(path=gsm8k, columns=columns).rows == rl_rows(data=gsm8k, columns=columns).rows


def test_the_hub_is_asked_for_the_set_the_configuration_and_the_split(monkeypatch):
    asked = []

    def read(source, path):
        asked.append((source, path))
        return GSM8K, {"rows": len(GSM8K)}

    monkeypatch.setattr(own_data, "read_source", read)
    columns = Columns(answer_pattern=HASHES)
    rl_rows(data="openai/gsm8k:main", columns=columns)
    load_benchmark("mine", "openai/gsm8k:main", columns=columns)
    rl_rows(data="o/n", columns=Columns(answer_pattern=HASHES, split="extra"))
    assert load_benchmark("mine", "o/n").rows, "columns are found by their names"
    assert asked.pop() == (Source(hub_id="o/n", split="test"), None)
    assert asked == [
        (Source(hub_id="openai/gsm8k", config="main", split="train"), None),
        (Source(hub_id="openai/gsm8k", config="main", split="test"), None),
        (Source(hub_id="o/n", split="extra"), None),
    ]


def test_a_benchmark_of_ones_own_columns(gsm8k, tmp_path):
    benchmark = load_benchmark("mine", gsm8k, columns=Columns(answer_pattern=HASHES))
    assert len(benchmark.rows) == 40
    assert benchmark.rows[1] == {
        "id": "mine/1",
        "problem": "A box has 3 pens. How many have 3 boxes?",
        "answer": "9",
        "source": "gsm.jsonl",
    }
    path = write(tmp_path / "some.jsonl", [*GSM8K, {"question": "P", "answer": "none"}])
    with pytest.raises(ValueError, match=r"must have an answer, .* 1 of 41 .* row 40 the"):
        load_benchmark("mine", path, columns=Columns(answer_pattern=HASHES))


def test_a_task_of_reasoning_gym_trains_by_its_own_scorer_on_items_that_evaluation_lacks():
    found = rl_rows(data="reasoning-gym:chain_sum", limit=30)
    evaluated = {row["problem"] for row in load_benchmark("reasoning-gym:chain_sum").rows}
    assert found.checker is REASONING_GYM and len(found.rows) == 30
    assert not evaluated & {row["problem"] for row in found.rows}
    assert json.loads(found.rows[0]["gold"])["task"] == "chain_sum"
    assert "not among the 100 that evaluate asks" in found.counts
    named = rl_rows(data="reasoning-gym:chain_sum", limit=30, verifier=REASONING_GYM)
    assert named.rows == found.rows


def test_whether_an_answer_can_be_graded_is_asked_of_the_verifier(tmp_path):
    golds = ("Ann is a knight", "42", GSM8K[0]["answer"])
    path = write(tmp_path / "rows.jsonl", [{"problem": "P", "answer": text} for text in golds])
    assert [row["answer"] for row in rl_rows(data=path).rows] == ["Ann is a knight", "42"]
    found = rl_rows(data=path, verifier=ROLES)
    assert [row["answer"] for row in found.rows] == ["Ann is a knight"]
    assert found.checker is ROLES


TESTS = '["assert add(2, 3) == 5"]'
PROGRAM = "<start_working_out>Add.<end_working_out>\n```python\ndef add(a, b): return a + b\n```"


@pytest.mark.parametrize(
    ("name", "reference"),
    [("python", TESTS), ("regex", r"4+2"), ("json", '{"type": "object"}'), ("countdown", "{}")],
)
def test_sft_does_not_teach_a_reference_that_is_not_an_answer(tmp_path, name, reference):
    rows = [{"problem": f"P{n}", "solution": PROGRAM, "answer": reference} for n in range(4)]
    path = write(tmp_path / "rows.jsonl", rows)
    found = sft_rows(data=path, verifier=get_verifier(name))
    assert all(PROJECT_PROMPT.taught(row) == PROGRAM for row in found.rows)


def test_sft_refuses_references_that_mathematics_cannot_grade(tmp_path):
    rows = [{"problem": f"P{n}", "solution": PROGRAM, "answer": TESTS} for n in range(4)]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        ValueError, match=r"math can grade, but none of 4 rows .* \(--verifier text"
    ):
        sft_rows(data=path)


def test_sft_teaches_an_answer_that_its_verifier_grades(tmp_path, monkeypatch):
    rows = [{"problem": f"P{n}", "solution": "w", "answer": "204 €"} for n in range(4)]
    path = write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "euros.py").write_text("def right(answer, gold): return answer == gold\n")
    (tmp_path / "tests.py").write_text("def right(answer, gold): return False\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, taught in {"text": True, "euros:right": True, "tests:right": False}.items():
        found = sft_rows(data=path, verifier=get_verifier(name))
        assert [row.get("answer") for row in found.rows] == [*["204 €" if taught else None] * 4]
