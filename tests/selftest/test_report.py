"""What a user pastes, and the table of GPUs that is made of what was sent."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from sage_unsloth.selftest.report import GPU_COLUMNS, markdown_report

ROOT = Path(__file__).parents[2]
SAMPLE = {
    "machine": {
        "device": "NVIDIA L4",
        "processor": "x86_64",
        "memory_gib": 22.05,
        "compute_capability": "8.9",
        "cuda": "13.0",
        "cards": 1,
    },
    "environment": {
        "python": "3.12.3",
        "packages": {"torch": "2.13.0", "unsloth": "2026.10.7", "vllm": None},
        "date": "2026-11-23T10:00:00+00:00",
        "commit": "0123456789abcdef",
    },
    "findings": [
        {
            "name": "loss, bfloat16, compiled",
            "status": "FAILED",
            "seconds": 31.4,
            "found": "gradient off by 3 | allowed\n1",
            "figures": {},
        },
        {
            "name": "guided step, time",
            "status": "passed",
            "seconds": 60.0,
            "found": "1.04 times",
            "figures": {"plain": 0.5, "guided": 0.52, "unit": "s", "ratio": 1.04},
        },
        {
            "name": "plan, activations and logits",
            "status": "passed",
            "seconds": 0.1,
            "found": "",
            "figures": {"planned_bytes": 3 * 2**30, "measured_bytes": 2.5 * 2**30},
        },
        {"name": "vLLM", "status": "not run", "seconds": None, "found": "", "figures": {}},
    ],
}


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_block_has_card_versions_and_every_row():
    block = markdown_report(SAMPLE)
    assert "- GPU: 1 x NVIDIA L4, 22.1 GiB, compute capability 8.9, CUDA 13.0" in block
    assert "- Python 3.12.3, torch 2.13.0, unsloth 2026.10.7\n" in block
    assert "- commit 0123456789abcdef, 2026-11-23" in block
    assert "- 2 passed, 1 FAILED, 1 not run (loss, bfloat16, compiled)" in block
    assert "| guided step, time | passed | 60 | 1.04 times |" in block
    assert "| vLLM | not run |  |  |" in block


def test_no_text_of_a_finding_ends_a_cell():
    row = next(line for line in markdown_report(SAMPLE).splitlines() if "FAILED | 31" in line)
    assert row == "| loss, bfloat16, compiled | FAILED | 31 | gradient off by 3 \\| allowed 1 |"


def test_a_machine_without_a_gpu_says_so():
    report = SAMPLE | {"machine": {"device": "a processor"}}
    assert "- GPU: none (a processor)" in markdown_report(report)


def test_a_report_becomes_a_row_of_the_table(tables, tmp_path):
    assert "No report of a GPU" in tables.from_gpus(tmp_path)
    (tmp_path / "l4.json").write_text(json.dumps(SAMPLE))
    header, _, row = tables.from_gpus(tmp_path).splitlines()
    assert header.count("|") == row.count("|") == len(GPU_COLUMNS) + 1
    for cell in (
        "NVIDIA L4",
        "torch 2.13.0",
        "1.04 × 0.5 s",
        "| – |",
        "2.50 of 3.00 GiB",
        "0123456",
    ):
        assert cell in row


def test_the_committed_table_is_of_the_committed_reports(tables):
    reports = list((ROOT / "data/results/gpu").glob("*.json"))
    page = (ROOT / "docs/tables/gpus.md").read_text()
    assert page.count("\n| ") == (len(reports) + 2 if reports else 0)


def test_the_issue_form_asks_for_what_the_command_prints():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/gpu_report.yml").read_text())
    fields = {field.get("id"): field for field in form["body"]}
    assert {"block", "record"} <= {
        name for name, field in fields.items() if (field.get("validations") or {}).get("required")
    }
    assert "doctor --deep" in form["body"][0]["attributes"]["value"]
    assert "To paste into a report:" in fields["block"]["attributes"]["description"]
