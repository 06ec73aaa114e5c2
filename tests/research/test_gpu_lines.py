"""The list of what only a GPU reaches is of today's source, and the calls there fit what is
installed.
"""

from pathlib import Path

import pytest
from bound_calls import UNSLOTH, VLLM, bind, calls, check, imported

from research.gpu_lines import ANSWERS, ROOT, Branch, branches, compare
from sage_unsloth.selftest.checks import all_checks


@pytest.mark.parametrize("call", calls(UNSLOTH), ids=lambda call: call.place)
def test_a_call_fits_what_is_installed(unsloth_module, call):
    check(call, UNSLOTH)


def test_a_wrong_call_is_noticed(unsloth_module):
    from unsloth import FastLanguageModel

    with pytest.raises(TypeError, match="no parameter"):
        bind(FastLanguageModel.from_pretrained, 1, ("max_sequence_length",))
    with pytest.raises(TypeError):
        bind(FastLanguageModel.get_peft_model, 0, ("r",))


def test_the_table_of_calls_has_all_that_is_imported_and_nothing_else():
    assert {call.written for call in calls(UNSLOTH | VLLM)} == {*UNSLOTH, *VLLM}
    # Of this one only the fields are read, and `test_bound_calls.py` compares them.
    assert imported() - {"EngineArgs"} <= {name.split(".")[0] for name in UNSLOTH | VLLM}


def test_every_branch_has_an_answer():
    open_ones = [branch for branch in branches() if branch.answer is None]
    assert not open_ones, "say in research/gpu_lines.py what runs it on a GPU"


def test_an_answer_names_a_check_that_exists():
    """One that begins with no other words is a check of `doctor --deep` by its name."""
    names = {check.name for check in all_checks()}
    for _, answer in ANSWERS:
        if not answer.startswith(("no check", "not of", "`doctor", "every check of a loss")):
            assert answer in names, answer


def test_a_new_branch_is_listed(tmp_path):
    Path(tmp_path, "new.py").write_text(
        "def choose():\n    if has_gpu():\n        return 1\n    return 2 if other else 3\n"
    )
    assert branches(tmp_path) == [Branch("new.py", "choose", "has_gpu()")]
    assert branches(tmp_path)[0].answer is None


def test_the_list_is_compared_with_what_ran_by_hand(tmp_path):
    Path(tmp_path, "a.py").write_text(
        '"""Words."""\n'
        "def one():\n    if has_gpu():\n        return 1\n    return (\n        2\n    )\n"
        "def both():\n    if fast_inference:\n        go()\n    else:\n        stop()\n"
        "def untested():\n    stop()\n"
    )
    found = compare({"a.py": frozenset({2, 3, 6, 8, 9, 10, 12, 13})}, tmp_path)
    assert found == {
        "statements": 10,
        "ran": 8,
        "never_ran_and_listed": 1,
        "never_ran_and_not_listed": 1,
        "one_ran": 1,
        "none_ran": 0,
        "both_ran": ["a.py: fast_inference"],
        "open": {"a.py": [14]},
    }


def test_the_table_is_in_the_documents():
    page = (ROOT.parent / "docs/tables/gpu-lines.md").read_text(encoding="utf-8")
    assert len(branches()) > 50
    assert all(f"`{branch.condition}`".replace("|", "\\|") in page for branch in branches())
