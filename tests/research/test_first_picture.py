"""The README's picture: its table follows from the committed records."""

import csv

import pytest

from research.data import DATA
from research.first_picture import LINES, PICTURE, curves, draw
from sage_unsloth.runs.files import read_json


def test_the_committed_table_follows_from_the_records():
    with PICTURE.with_suffix(".csv").open(encoding="utf-8") as file:
        committed = list(csv.DictReader(file))
    rows = curves()
    assert [(row["line"], int(row["k"])) for row in committed] == [
        (row["line"], row["k"]) for row in rows
    ]
    for name in ("mean", "low", "high", "seeds"):
        values = [float(row[name]) for row in committed]
        assert values == pytest.approx([row[name] for row in rows], abs=1e-12)


def test_trained_models_have_the_levels_of_the_report():
    fresh = DATA / "results" / "frontier" / "arithmetic" / "fresh" / "report.json"
    points = read_json(fresh)["points"]
    rows = {(row["line"], row["k"]): row for row in curves()}
    for (algorithm, setting, strength), (label, *_) in LINES.items():
        if strength is not None:
            point = points[f"{algorithm} {setting}={strength:g}"]
            for k, name in ((1, "pass@1"), (32, "pass@k")):
                level = {end: rows[label, k][end] for end in ("mean", "low", "high")}
                assert level == pytest.approx(point[name])


def test_the_picture_is_drawn_with_its_table(tmp_path):
    draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    table = (tmp_path / "picture.csv").read_bytes()
    assert table == PICTURE.with_suffix(".csv").read_bytes()
