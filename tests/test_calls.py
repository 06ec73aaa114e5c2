"""The calls into Unsloth, bitsandbytes and TRL fit what is installed, those of a GPU too."""

import pytest
from bound_calls import UNSLOTH, VLLM, bind, calls, check, imported


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
    # Of this one only the fields are read, and `engines/test_bound_calls.py` compares them.
    assert imported() - {"EngineArgs"} <= {name.split(".")[0] for name in UNSLOTH | VLLM}
