"""Binds the package's calls into other packages to the installed signatures; makes none."""

import ast
import functools
import importlib
import inspect
from typing import NamedTuple

from research.gpu_lines import ROOT

# As the source writes a callable: (module, its name there).
UNSLOTH = {
    "FastLanguageModel.from_pretrained": ("unsloth", "FastLanguageModel.from_pretrained"),
    "FastLanguageModel.get_peft_model": ("unsloth", "FastLanguageModel.get_peft_model"),
    "FastLanguageModel.for_inference": ("unsloth", "FastLanguageModel.for_inference"),
    "patch_saving_functions": ("unsloth.save", "patch_saving_functions"),
    "model.save_pretrained_merged": ("unsloth.save", "unsloth_save_pretrained_merged"),
    "patched.save_pretrained_gguf": ("unsloth.save", "unsloth_save_pretrained_gguf"),
    "zoo.patch_vllm": ("unsloth_zoo.vllm_utils", "patch_vllm"),
    "zoo.load_lora": ("unsloth_zoo.vllm_utils", "load_lora"),
    "rl.patch_trl_vllm_generation": ("unsloth.models.rl", "patch_trl_vllm_generation"),
    "dequantize_4bit": ("bitsandbytes.functional", "dequantize_4bit"),
    "self.generation.generate": ("trl.generation.vllm_generation", "VLLMGeneration.generate"),
}
VLLM = {
    "LLM": ("vllm", "LLM"),
    "self.llm.generate": ("vllm", "LLM.generate"),
    "SamplingParams": ("vllm", "SamplingParams"),
    "LoRARequest": ("vllm.lora.request", "LoRARequest"),
}
METHODS = {
    "model.save_pretrained_merged",
    "patched.save_pretrained_gguf",
    "self.generation.generate",
    "self.llm.generate",
}
ON_PURPOSE = {"safe_serialization"}
"""Named by Unsloth's own signature or taken by its **kwargs."""
PACKAGES = ("unsloth", "unsloth_zoo", "bitsandbytes", "vllm")


class Call(NamedTuple):
    """`written` is the callable as the source has it; `starred`: it is given `**` too."""

    place: str
    written: str
    positions: int
    names: tuple[str, ...]
    starred: bool


def calls(table):
    """Each call of the package's source to a callable of the table."""
    found = []
    for place, node in _nodes(ast.Call):
        written = ast.unparse(node.func)
        if written in table:
            names = tuple(word.arg for word in node.keywords if word.arg is not None)
            starred = len(names) < len(node.keywords)
            found.append(Call(f"{place}:{written}", written, len(node.args), names, starred))
    return found


def imported():
    """Names that the package's source imports from `PACKAGES`."""
    return {
        name.name
        for _, node in _nodes(ast.ImportFrom)
        if (node.module or "").split(".")[0] in PACKAGES
        for name in node.names
    }


def check(call, table):
    """Bind a call to what is installed.

    Raises:
        TypeError: it does not fit.
    """
    module, name = table[call.written]
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    positions = call.positions + (call.written in METHODS)  # self
    bind(function, positions, call.names, partial=call.starred)


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


def _nodes(kind):
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield file.relative_to(ROOT), node
