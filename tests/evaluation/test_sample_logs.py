"""Logs that other tools really wrote, read and compared; and what cannot be read is refused."""

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.evaluation import compare_sets
from sage_unsloth.evaluation.lm_eval_log import read_lm_eval_log as read_lm_eval
from sage_unsloth.evaluation.record_tables import record_set
from sage_unsloth.evaluation.report import find_sets
from sage_unsloth.evaluation.report_text import report_text
from sage_unsloth.evaluation.sample_logs import (
    ReadingOptions,
    log_sets,
    parse_pairs,
    read_log,
    tool_of,
)

LOGS = Path(__file__).parent / "logs"
LM_EVAL = LOGS / "lm_eval-0.4.13" / "arithmetic-base"
INSPECT = LOGS / "inspect_ai-0.3.285"
(SUMS,) = LM_EVAL.glob("samples_sums_2026*")
(REPEATED,) = LM_EVAL.glob("samples_sums_repeated*")
(CHOICE,) = LM_EVAL.glob("samples_sums_choice*")
EPOCHS, DOCUMENT, NO_SAMPLES = sorted(INSPECT.glob("*.json"))
STRICT = ReadingOptions(metrics=["exact_match,strict-match"])


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_tool_is_known_by_the_content_of_its_log(tmp_path):
    for path in (SUMS, REPEATED, CHOICE):
        assert tool_of(path) == "lm-evaluation-harness"
    for path in (EPOCHS, DOCUMENT, NO_SAMPLES):
        assert tool_of(path) == "inspect_ai"
    (tmp_path / "report.json").write_text('{"table": []}')
    (tmp_path / "a.jsonl").write_text('{"problem_id": "p", "sample": 0}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text("{")
    assert [tool_of(file) for file in sorted(tmp_path.iterdir())] == [None] * 4


def test_lm_eval_grades_are_those_of_its_own_results():
    """The tool's own table: exact_match .1667 under strict-match, .3333 under flexible-extract."""
    log = read_log(SUMS)
    assert (log.model, log.task, log.temperature) == ("arithmetic-base", "sums", 1.0)
    for metric, correct in (("strict-match", 2), ("flexible-extract", 4)):
        options = ReadingOptions(metrics=[f"exact_match,{metric}"])
        (found,) = log_sets([log], [], options)
        assert found.correct.shape == (12, 1) and found.correct.sum() == correct
        assert found.grader == f"lm-evaluation-harness: exact_match,{metric}"
    assert all("working out" in text and "=?" in text for text in found.texts.values())


def test_a_choice_without_text_counts_by_its_metric():
    (found,) = log_sets([read_log(CHOICE)], [], ReadingOptions(metrics=["acc,none"]))
    assert found.correct.all() and found.correct.shape == (12, 1)


def test_inspect_grades_are_those_of_its_own_results():
    """Its results say accuracy .3541666, which is 17 of 48."""
    log = read_log(EPOCHS)
    assert (log.model, log.task, log.temperature) == ("hf/arithmetic-base", "sums", 1.0)
    (found,) = log_sets([log], [], ReadingOptions())
    assert found.correct.shape == (12, 4) and found.correct.sum() == 17
    assert found.grader == "inspect_ai: pattern"
    assert found.golds["sums/1"] == "242" and found.texts["sums/1"] == "22*11=?"
    assert found.examples["sums/1"]["correct"]["completion"].startswith("22")


def test_epochs_of_inspect_are_samples_and_its_scores_grades():
    raw = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    (found,) = log_sets([read_log(DOCUMENT)], [], ReadingOptions())
    assert found.problems == ("sums/1", "sums/2", "sums/3")
    expected = defaultdict(dict)
    for sample in raw["samples"]:
        value = sample["scores"]["pattern"]["value"]
        expected[f"sums/{sample['id']}"][sample["epoch"] - 1] = value == "C"
    rows = [[expected[problem][i] for i in range(2)] for problem in found.problems]
    assert np.array_equal(found.correct, rows)
    usage = [sample["output"]["usage"]["output_tokens"] for sample in raw["samples"]]
    assert sorted(record["num_tokens"] for record in found.records) == sorted(usage)


def test_logs_of_two_tools_are_compared(tmp_path):
    result = compare_sets(
        [f"lm={SUMS}", f"inspect={EPOCHS}"], tmp_path, logs=STRICT, against="inspect"
    )
    curve = result["pass_at_k"]["sums"]
    assert curve["lm"]["1"]["mean"] == pytest.approx(2 / 12)
    assert curve["inspect"]["1"]["mean"] == pytest.approx(17 / 48)
    (pair,) = result["differences"]["sums"]
    assert pair == "lm - inspect" and list(result["differences"]["sums"][pair]) == ["1"]
    rows = {row["model"]: row for row in result["table"]}
    assert rows["lm"]["tokens"] is None and rows["lm"]["unparsable"] is None
    assert rows["inspect"]["tokens"] > 0
    text = report_text(result)
    assert "lm: sampled by lm-evaluation-harness, graded by lm-evaluation-harness: exact" in text
    assert (tmp_path / "pass_at_k.png").is_file() and (tmp_path / "table.csv").is_file()


def test_regrading_gives_every_repeat_a_grade_of_its_own():
    """In this log, an answer that is the gold stands between whole tags, and is a number."""
    options = ReadingOptions(regrade=True)
    (found,) = log_sets([read_log(REPEATED)], [], options)
    counts = {}
    for line in lines_of(REPEATED):
        wanted = f"<SOLUTION>{line['target']}</SOLUTION>"
        counts[f"sums_repeated/{line['doc_id']}"] = sum(
            text.endswith(wanted) for text in line["resps"][0]
        )
    assert dict(zip(found.problems, found.correct.sum(axis=1), strict=True)) == counts
    assert sum(counts.values()) == 17 and found.grader.startswith("math ")


@pytest.mark.parametrize("given", [CHOICE, LM_EVAL], ids=["the log", "its folder"])
def test_log_likelihoods_are_not_graded_here(given, tmp_path, capsys):
    assert main(["compare", str(given), "--regrade", "--out", str(tmp_path / "out")]) == 2
    assert (
        f"--regrade grades completions, but {CHOICE} has log-likelihoods of given answers: "
        "compare it without --regrade: --metric acc,none or acc_norm,none"
    ) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_log_likelihoods_without_a_metric_to_take_are_left_out(tmp_path):
    """As of perplexity: neither the tool's grade nor ours."""
    lines = [line | {"metrics": ["bits"], "bits": 1.25} for line in lines_of(CHOICE)]
    log = read_log(write_lines(tmp_path / "samples_x_2026-11-22T04-27-13.7.jsonl", lines))
    with pytest.raises(ValueError, match=r"'bits,none', which are not: leave the log out"):
        log_sets([log], [], ReadingOptions())
    with pytest.raises(ValueError, match="log-likelihoods of given answers"):
        log_sets([log], [], ReadingOptions(regrade=True))


def ours(problems=None, golds=None):
    """A record set of three samples on the logs' problems, all correct."""
    golds = golds or [line["target"] for line in lines_of(SUMS)[:12]]
    problems = problems or [f"sums-{number}" for number in range(len(golds))]
    records = [
        {
            "problem_id": problem,
            "sample": sample,
            "grade": "correct",
            "gold": gold,
            "num_tokens": 1,
            "finish_reason": "stop",
            "grader": "math 4, mpmath 1.3.0, evaluation extraction 2",
        }
        for problem, gold in zip(problems, golds, strict=True)
        for sample in range(3)
    ]
    return record_set(records, "ours", "sums", {"temperature": 1.0})


def test_problems_are_put_together_by_order_and_golds():
    mine = ours()
    (theirs,) = log_sets([read_log(EPOCHS)], [mine], ReadingOptions())
    assert theirs.problems == mine.problems and dict(theirs.golds) == dict(mine.golds)
    assert set(theirs.texts) == set(mine.problems)
    # A set that was drawn in another order has the benchmark's in its texts.
    turned = ours(list(mine.golds)[::-1], list(mine.golds.values())[::-1])
    texts = dict.fromkeys(mine.golds, "?")
    (again,) = log_sets([read_log(EPOCHS)], [replace(turned, texts=texts)], ReadingOptions())
    assert again.problems == mine.problems
    (regraded,) = log_sets([read_log(EPOCHS)], [mine], ReadingOptions(regrade=True))
    assert regraded.grader == mine.grader


def test_golds_that_are_whole_solutions_are_compared_by_their_answers(tmp_path):
    lines = lines_of(SUMS)
    for line in lines:
        line["target"] = f"First 20, then more.\n#### {int(line['target']):,}"
    path = write_lines(tmp_path / "samples_sums_2026-11-22T04-27-13.7.jsonl", lines)
    mine = ours()
    (theirs,) = log_sets([read_log(path)], [mine], STRICT)
    assert theirs.problems == mine.problems


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (lambda golds: ours(golds=golds[:5]), "has 12 and the set before it 5"),
        (lambda golds: ours(golds=golds[::-1]), "golds, but 12 differ: sums/0 of .* has '242'"),
    ],
)
def test_other_problems_are_refused(mine, message):
    golds = [line["target"] for line in lines_of(SUMS)[:12]]
    with pytest.raises(ValueError, match=message):
        log_sets([read_log(SUMS)], [mine(golds)], STRICT)


def test_a_task_takes_the_benchmark_that_it_is_said_to_have():
    options = ReadingOptions(regrade=True, same=parse_pairs(["sums_repeated=sums"]))
    (found,) = log_sets([read_log(REPEATED)], [ours()], options)
    assert found.benchmark == "sums" and found.problems[0] == "sums-0"
    with pytest.raises(ValueError, match="--same must be TASK=BENCHMARK, got 'sums'"):
        parse_pairs(["sums"])
    with pytest.raises(ValueError, match="--same must name what the logs have, 'sums', got 'gsm'"):
        log_sets([read_log(SUMS)], [], replace(STRICT, same={"gsm": "sums"}))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (SUMS, r"'exact_match,strict-match', 'exact_match,flexible-extract'. Choose one"),
        (CHOICE, r"has 'acc,none', 'acc_norm,none'. Choose one of them with --metric"),
        (REPEATED, r"grade of its own.*filter leaves of 4 responses\): give --regrade"),
    ],
)
def test_what_is_correct_must_be_plain(path, message):
    with pytest.raises(ValueError, match=message):
        log_sets([read_log(path)], [], ReadingOptions())


def test_a_metric_that_no_log_has_is_refused():
    with pytest.raises(ValueError, match="--metric must name what the logs have, 'pattern', got"):
        log_sets([read_log(EPOCHS)], [], STRICT)


def test_a_metric_that_is_no_yes_or_no_is_refused(tmp_path):
    lines = [line | {"bleu": 0.25, "metrics": ["bleu"]} for line in lines_of(SUMS)]
    path = write_lines(tmp_path / "samples_x_2026-11-22T04-27-13.7.jsonl", lines)
    with pytest.raises(ValueError, match=r"0 or 1 for every sample.*'bleu,strict-match'"):
        log_sets([read_log(path)], [], ReadingOptions())


def edited(tmp_path, change):
    log = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    change(log)
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: log["samples"].pop(), "as many graded samples of every problem"),
        (lambda log: log["samples"][1].update(error={"message": "x"}), "1 of .* have errors"),
    ],
)
def test_a_log_that_is_not_whole_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_log(edited(tmp_path, change))


def test_a_log_without_samples_is_refused():
    with pytest.raises(ValueError, match=r"must have its samples, but .* has none"):
        read_log(NO_SAMPLES)


def test_scores_of_several_values_are_metrics_each(tmp_path):
    def change(log):
        for number, sample in enumerate(log["samples"]):
            sample["scores"]["pattern"]["value"] = {"right": "C" if number else "I", "style": 0.5}

    (found,) = log_sets([read_log(edited(tmp_path, change))], [], ReadingOptions())
    assert found.grader == "inspect_ai: pattern/right" and found.correct.sum() == 5


def test_an_archive_of_inspect_is_refused_with_the_command_that_makes_json_of_it(tmp_path):
    (tmp_path / "a.eval").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"must be JSON, .*inspect log convert --to json --output"):
        read_log(tmp_path / "a.eval")


def test_a_line_that_is_no_sample_is_refused(tmp_path):
    path = write_lines(tmp_path / "samples_x.jsonl", [*lines_of(SUMS), {"doc_id": 3}])
    with pytest.raises(ValueError, match="line 25 of"):
        read_lm_eval(path)


def test_logs_are_found_in_folders_and_by_name(tmp_path):
    folder = tmp_path / "out" / "my=model"
    shutil.copytree(LM_EVAL, folder)
    (folder / "results_2026.json").write_text('{"results": {}}')
    sets, logs = find_sets([tmp_path / "out", f"other={EPOCHS}"])
    assert sets == [] and len(logs) == 4
    assert logs[EPOCHS] == "other" and logs[folder / SUMS.name] is None
    assert find_sets([folder / SUMS.name])[1] == {folder / SUMS.name: None}
    with pytest.raises(ValueError, match="a record set, another tool's log, or a folder with some"):
        find_sets([tmp_path / "nothing"])
