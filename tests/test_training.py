"""What both stages share: rows, settings, trackers, checkpoints."""

import json

import pytest

from sage_unsloth.records import read_jsonl
from sage_unsloth.training import (
    check_rows,
    check_tracker,
    in_words,
    last_checkpoint,
    read_metrics,
    run_settings,
)

def test_metrics_after_a_resume_count_once(tmp_path):
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == [lines[0], lines[2]]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize(


