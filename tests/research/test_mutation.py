"""Committed samples of mutants: every survivor is judged, nine in ten others are noticed."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "data" / "results" / "reliability" / "mutation"


@pytest.mark.smoke
@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_mutants_are_noticed(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    survivors = found["survivors"]
    assert found["noticed"] + len(survivors) == found["tried"] >= 40
    judged = [row["judged"].partition(":")[0] for row in survivors.values()]
    assert set(judged) <= {"equivalent", "wording", "test missing"}
    counted = found["tried"] - judged.count("equivalent") - judged.count("wording")
    assert found["noticed"] >= 0.9 * counted


def test_there_is_a_sample():
    assert list(RESULTS.glob("*.json"))
