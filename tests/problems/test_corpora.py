"""Training rows from local files in the hub's columns: what is kept, what is counted, what is
refused.
"""

import json

import pytest

from sage_unsloth.models.embedded import data_folder
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.corpora import rl_corpus, sft_corpus, without_think_tags
from sage_unsloth.problems.corpus import Filters, make_corpus
from sage_unsloth.problems.held_out import hold_out
from sage_unsloth.problems.sources import Source, read_file, read_source

SMOKE = data_folder() / "smoke"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(data_folder() / "arithmetic-base")


def open_math(**changes):
    row = {
        "problem": "6*7=?",
        "generated_solution": "<think>6*7=42</think>",
        "expected_answer": "42",
    }
    return {key: value for key, value in (row | changes).items() if value is not ...}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sft_rows_are_numeric_short_and_counted(tokenizer):
    corpus = sft_corpus(tokenizer, 160, path=SMOKE / "openmathreasoning-mini.jsonl")
    # 48 good rows; an answer that is no number, a solution without working, one that is too long.
    assert list(corpus.counts.values()) == [51, 49, 49, 48]
    assert len(corpus.rows) == 48
    expected = arithmetic.problems("sft")[0]
    assert corpus.rows[0] == {key: expected[key] for key in ("problem", "solution", "answer")}
    assert corpus.provenance["rows"] == 51 and len(corpus.provenance["sha256"]) == 64


def test_the_first_rows_that_a_filter_left_out_are_named(tokenizer, tmp_path):
    rows = [open_math(problem=f"{n}*7=?", expected_answer="x" if n > 2 else "42") for n in range(9)]
    rows += [open_math(problem="What is\n six times seven? " * 9)]
    found = sft_corpus(tokenizer, 160, path=write(tmp_path / "rows.jsonl", rows))
    assert found.left_out_text().splitlines() == [
        "left out by numeric answer, some working, the first: '3*7=?', '4*7=?', '5*7=?'",
        "left out by prompt <= 80 tokens, the first: 'What is six times seven? What is six times "
        "seven? What is …'",
    ]
    path = write(tmp_path / "rl.jsonl", [{"prompt": "1+1=?", "solution": "2"}] * 2)
    assert rl_corpus(tokenizer, 64, path=path).left_out_text() == ""


def test_sft_length_counts_the_eos(tokenizer, tmp_path):
    working = "6*7=42;" * 9  # longer than the prompt, so that the whole row decides
    path = write(tmp_path / "one.jsonl", [open_math(generated_solution=working)])
    text = (
        "You are given a problem.\nThink about the problem and provide your working out.\n"
        "Place it between <start_working_out> and <end_working_out>.\n"
        f"Then, provide your solution between <SOLUTION></SOLUTION>{tokenizer.eos_token}6*7=?"
        f"<start_working_out>{working}<end_working_out><SOLUTION>42</SOLUTION>"
        + tokenizer.eos_token
    )
    length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    prompt = len(tokenizer(text.split("6*7=42")[0], add_special_tokens=False)["input_ids"])
    assert 2 * prompt < length - 1
    assert len(sft_corpus(tokenizer, length, path=path).rows) == 1
    with pytest.raises(ValueError, match=rf", whole row <= {length - 1} tokens: 0\)"):
        sft_corpus(tokenizer, length - 1, path=path)


def test_a_long_prompt_is_left_out_even_where_the_row_fits(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [open_math(), open_math(problem="1+" * 60 + "1=?")])
    corpus = sft_corpus(tokenizer, 200, path=path)
    assert list(corpus.counts.values()) == [2, 2, 1, 1]


@pytest.mark.parametrize("answer", ["42", "-3", "0.5", "3/4", "1,234", "1e3"])
def test_numeric_answers_are_kept(tokenizer, tmp_path, answer):
    path = write(tmp_path / "rows.jsonl", [open_math(expected_answer=answer)])
    assert sft_corpus(tokenizer, 400, path=path).rows[0]["answer"] == answer


@pytest.mark.parametrize("answer", ["x", "(1, 2)", "x^2 + 1", "", "42 or 43"])
def test_other_answers_are_left_out(tokenizer, tmp_path, answer):
    path = write(tmp_path / "rows.jsonl", [open_math(), open_math(expected_answer=answer)])
    assert len(sft_corpus(tokenizer, 400, path=path).rows) == 1


def test_rl_rows_keep_their_order_and_long_prompts_go(tokenizer, tmp_path):
    rows = [
        {"prompt": f"{i}+1=?" + "1+1=?" * 9 * (i == 2), "solution": str(i + 1)} for i in range(6)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    corpus = rl_corpus(tokenizer, 80, path=path, limit=5)
    assert [row["problem"] for row in corpus.rows] == ["0+1=?", "1+1=?", "3+1=?", "4+1=?"]
    expected = {"rows": 6, "first 5": 5, "answer can be graded": 5, "prompt <= 80 tokens": 4}
    assert corpus.counts == expected
    assert len(rl_corpus(tokenizer, 80, path=path, limit=None).rows) == 5


def test_answers_that_cannot_be_graded_are_left_out(tokenizer, tmp_path):
    answers = ["42", r"\frac{1}{2}", "x_{1", "-7", "x" * 2001, "{", r"\sqrt{2}"]
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1=?", "solution": a} for a in answers])
    corpus = rl_corpus(tokenizer, 80, path=path)
    assert [row["answer"] for row in corpus.rows] == ["42", r"\frac{1}{2}", "-7", r"\sqrt{2}"]


def test_the_first_2000_rows_are_the_default(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1=?", "solution": "2"}] * 2001)
    assert len(rl_corpus(tokenizer, 80, path=path).rows) == 2000


def test_the_embedded_task_is_a_corpus_too(tokenizer):
    assert len(rl_corpus(tokenizer, 64, data="arithmetic").rows) == 220
    assert len(sft_corpus(tokenizer, 160, data="arithmetic").rows) == 300


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"problem": "1+1=?", "solution": "2"}],
            r"row 0 lacks 'prompt' and has \['problem', 'solution'\]",
        ),
        (
            [{"prompt": "1+1=?", "solution": "2"}, {"prompt": ["1"], "solution": "2"}],
            "'prompt' must be a non-empty text, but row 1 has",
        ),
        (
            [{"prompt": "1+1=?", "solution": " "}],
            "'solution' must be a non-empty text, but row 0 has ' '",
        ),
        ([{"prompt": "1+1=?", "solution": 2}], "row 0 has 2"),
        (
            [{"prompt": "1+1=?" * 50, "solution": "2"}],
            r"got none \(rows: 1, first 2,000: 1, answer can be graded: 1, prompt <= 64 tokens: "
            r"0\). Raise the length",
        ),
        ([], "got none"),
    ],
)
def test_bad_rl_rows_are_named(tokenizer, tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        rl_corpus(tokenizer, 64, path=write(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem": ...}, "lacks 'problem'"),
        ({"problem": ""}, "'problem' must be a non-empty text"),
        ({"generated_solution": None}, "'generated_solution' must be"),
        ({"expected_answer": 42}, "row 0 has 42"),
    ],
)
def test_bad_sft_rows_are_named(tokenizer, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        sft_corpus(tokenizer, 400, path=write(tmp_path / "rows.jsonl", [open_math(**changes)]))


def test_unknown_data_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"data must be one of dapo, arithmetic, .*, got 'gsm'"):
        rl_corpus(tokenizer, 64, data="gsm")


def test_think_tags_go_and_the_working_stays():
    assert without_think_tags("<think>\na\n</think>\nb ") == "a\n\nb"


def test_held_out_rows_share_no_problem_with_training():
    rows = [{"problem": f"{i // 2}", "answer": str(i)} for i in range(40)]
    training, kept = hold_out(rows, 5)
    assert len(kept) == 5
    assert not {row["problem"] for row in training} & {row["problem"] for row in kept}
    assert len({row["id"] for row in kept}) == 5
    assert len(training) == 40 - 2 * 5
    assert hold_out(rows, 0) == (rows, [])
    with pytest.raises(ValueError, match="got 40 of 40"):
        hold_out(rows, 40)
    with pytest.raises(ValueError, match="must leave another problem"):
        hold_out([{"problem": "1"}] * 4, 2)


ROWS = [{"prompt": "1+1=?", "solution": "2"}, {"prompt": "2+2=?", "solution": "4"}]


def test_every_format_gives_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("\ufeffprompt,solution\n1+1=?,2\n\n2+2=?,4\n")
    for suffix in ("jsonl", "json", "parquet", "csv"):
        assert read_file(tmp_path / f"rows.{suffix}") == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.xls", "a,b", r"must end in one of .jsonl, .json, .parquet, .csv, got 'rows.xls'"),
        ("rows.csv", "", r"must begin with a line of different column names, got \[\]"),
        ("rows.csv", "a,a\n1,2\n", "must begin with a line of different column names"),
        ("rows.csv", 'a,b\n"1\n2",3\n4,5,6\n', "must have 2 cells in each row, but line 4 has 3"),
        ("rows.csv", 'a,b\n1,"2', "must be CSV in UTF-8"),
        ("rows.json", "{", "must be JSON"),
        ("rows.json", "{}", "one list of objects, got dict"),
        ("rows.json", "[1]", "one list of objects"),
        ("rows.jsonl", "1\n2\n", "one JSON object"),
        ("rows.parquet", "no", "must be a parquet file"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / name)
    with pytest.raises(ValueError, match="there is none at"):
        read_file(tmp_path / "absent.jsonl")


def test_cells_of_a_csv_are_text_as_written(tmp_path):
    (tmp_path / "rows.csv").write_text('ask,total,note\n"1,5 + 2",007,\n"a\nb",1.50," x"\n')
    assert read_file(tmp_path / "rows.csv") == [
        {"ask": "1,5 + 2", "total": "007", "note": None},
        {"ask": "a\nb", "total": "1.50", "note": " x"},
    ]
    (tmp_path / "rows.csv").write_bytes("a\n\xe9\n".encode("latin-1"))
    with pytest.raises(ValueError, match="must be CSV in UTF-8"):
        read_file(tmp_path / "rows.csv")


def test_without_a_network_the_error_names_the_way_out():
    """The test session is offline (HF_HUB_OFFLINE), so this is the real error of the real
    loader.
    """
    source = Source(
        hub_id="open-r1/DAPO-Math-17k-Processed", config="en", split="train", revision="main"
    )
    with pytest.raises(ValueError, match=r"could not be read .* Check the name and the network"):
        read_source(source)


def test_another_number_of_rows_is_an_error_that_names_both(monkeypatch):
    from sage_unsloth.problems import sources

    monkeypatch.setattr(sources, "_from_hub", lambda source: (ROWS, "abc123"))
    source = Source(hub_id="a/b", split="train", num_rows=3)
    with pytest.raises(ValueError, match="must have 3 rows, got 2 at revision abc123"):
        read_source(source)
    rows, provenance = read_source(Source(hub_id="a/b", split="train", num_rows=2))
    assert rows == ROWS and provenance["revision"] == "abc123"


def test_duplicate_questions_are_counted():
    rows = [{"problem": "1+1", "answer": a} for a in ("2", "2", "3")]
    rows.append({"problem": "2+2", "answer": "4"})
    said = make_corpus(rows, Filters({"rows": 4}, {}), {}).duplicates_text()
    assert said.startswith("Duplicate questions: 2 of 4 rows repeat that of another, 1 questions")
    assert "2 of 4" in make_corpus(rows[:2] + rows[3:] * 2, Filters({}, {}), {}).duplicates_text()
    assert make_corpus(rows[2:], Filters({}, {}), {}).duplicates_text() == ""
