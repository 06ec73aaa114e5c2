"""Committed samples of mutants: every survivor is judged, nine in ten others are noticed."""

import json
from pathlib import Path

import pytest

from research.mutation import JUDGEMENTS, score

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "data" / "results" / "reliability" / "mutation"
STRICT = {"objective", "patch", "methods", "grading", "runs"}


@pytest.mark.smoke
@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_mutants_are_noticed(file):
    result = json.loads(file.read_text(encoding="utf-8"))
    survivors = result["survivors"]
    assert result["noticed"] + len(survivors) == result["tried"] >= 15
    for row in survivors.values():
        word, _, reason = row["judged"].partition(": ")
        assert word in JUDGEMENTS and reason
        if word in ("other test", "test added"):
            path, _, name = reason.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
    counted, _, now = score(result)
    assert now >= (0.95 if result["room"] in STRICT else 0.9) * counted


def test_every_room_has_a_sample():
    rooms = {file.parent.name for file in (ROOT / "sage_unsloth").glob("*/__init__.py")}
    assert rooms <= {file.stem for file in RESULTS.glob("*.json")}
