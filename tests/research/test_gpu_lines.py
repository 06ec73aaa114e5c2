"""The list of what only a GPU reaches is of today's source, and the calls there fit what is
installed.
"""

import ast
import functools
import importlib
import inspect
from pathlib import Path

import pytest

from research.gpu_lines import ANSWERS, ROOT, Branch, branches
from sage_unsloth.selftest.checks import all_checks

UNSLOTH = {
    # As the source writes a callable: (module, its name there).
    "FastLanguageModel.from_pretrained": ("unsloth", "FastLanguageModel.from_pretrained"),
    "FastLanguageModel.get_peft_model": ("unsloth", "FastLanguageModel.get_peft_model"),
    "FastLanguageModel.for_inference": ("unsloth", "FastLanguageModel.for_inference"),
    "patch_saving_functions": ("unsloth.save", "patch_saving_functions"),
    "model.save_pretrained_merged": ("unsloth.save", "unsloth_save_pretrained_merged"),
    "patched.save_pretrained_gguf": ("unsloth.save", "unsloth_save_pretrained_gguf"),
    "dequantize_4bit": ("bitsandbytes.functional", "dequantize_4bit"),
}
METHODS = {"model.save_pretrained_merged", "patched.save_pretrained_gguf"}
ON_PURPOSE = {"safe_serialization"}
"""Named by Unsloth's own signature or taken by its **kwargs."""


def calls():
    """(place, callable as written, number of positions, names) of each call into these packages."""
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSLOTH:
                place = f"{file.relative_to(ROOT)}:{ast.unparse(node.func)}"
                names = tuple(word.arg for word in node.keywords if word.arg is not None)
                starred = len(names) < len(node.keywords)
                yield place, ast.unparse(node.func), len(node.args), names, starred


def bind(function, positions, names, *, partial=False):
    """Bind a call to a signature by its form; a name that only **kwargs takes does not fit.

    Raises:
        TypeError: it does not fit.
    """
    signature = inspect.signature(function)
    method = signature.bind_partial if partial else signature.bind
    bound = method(*[None] * positions, **dict.fromkeys(names))
    rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    loose = {name for key in rest for name in bound.arguments.get(key, {})}
    if loose - ON_PURPOSE:
        raise TypeError(f"no parameter of this name: {sorted(loose)}")


@pytest.mark.parametrize("call", list(calls()), ids=lambda call: call[0])
def test_a_call_fits_what_is_installed(unsloth_module, call):
    _, written, positions, names, starred = call
    module, name = UNSLOTH[written]
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    positions += written in METHODS  # self
    bind(function, positions, names, partial=starred)


def test_a_wrong_call_is_noticed(unsloth_module):
    from unsloth import FastLanguageModel

    with pytest.raises(TypeError, match="no parameter"):
        bind(FastLanguageModel.from_pretrained, 1, ("max_sequence_length",))
    with pytest.raises(TypeError):
        bind(FastLanguageModel.get_peft_model, 0, ("r",))


def test_every_callable_of_the_table_is_called():
    assert {written for _, written, *_ in calls()} == set(UNSLOTH)


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


def test_the_table_is_in_the_documents():
    page = (ROOT.parent / "docs/tables/gpu-lines.md").read_text(encoding="utf-8")
    assert len(branches()) > 50
    assert all(f"`{branch.condition}`".replace("|", "\\|") in page for branch in branches())
