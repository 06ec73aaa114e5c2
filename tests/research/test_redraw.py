"""Figures that the repository does not keep are drawn from the records that it does."""

import csv
import shutil
from pathlib import Path

import pytest

from research.redraw import main, redraw

RESULTS = Path(__file__).parents[2] / "data" / "results"


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize(
    ("folder", "figures"),
    [
        ("benchmark/arithmetic/pilot", {"pass_at_k", "differences", "training", "reward_and_test"}),
        ("frontier/countdown/fresh", {"frontier", "differences"}),
    ],
)
def test_every_figure_is_drawn_from_the_records_alone(folder, figures, tmp_path):
    shutil.copy(RESULTS / folder / "records.json", tmp_path)
    main([str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.png")} == figures
    for name in figures:
        found, committed = (
            list(csv.DictReader((place / f"{name}.csv").open()))
            for place in (tmp_path, RESULTS / folder)
        )
        assert len(found) == len(committed) > 1
        for row, before in zip(found, committed, strict=True):
            assert {k: number(v) for k, v in row.items()} == {
                k: pytest.approx(number(v)) for k, v in before.items()
            }, name


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds none"):
        redraw(tmp_path)
