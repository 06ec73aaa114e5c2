"""The committed result of the tests with the real vLLM: all that there are, and passed."""

import ast
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "data" / "results" / "reliability" / "vllm_cpu.json"


def test_every_test_with_the_real_vllm_has_passed():
    written = {
        f"{file.stem}::{node.name}"
        for file in (ROOT / "tests" / "engines").glob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert len(written) > 10
    assert written == {name.partition("[")[0] for name in found["tests"]}
    assert {test["outcome"] for test in found["tests"].values()} == {"passed"}
    assert found["environment"]["packages"]["vllm"] == "0.32.0"
