"""Figures that the repository does not keep are drawn from the records that it does."""

import csv
import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from research.redraw import main, redraw
from sage_unsloth.figures import BLUE

RESULTS = Path(__file__).parents[2] / "data" / "results"
PICTURES = RESULTS.parents[1] / "docs" / "pictures"


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize(
    ("folder", "figures"),
    [
        ("benchmark/arithmetic/pilot", {"pass_at_k", "differences"}),
        ("frontier/countdown/fresh", {"frontier", "differences"}),
    ],
)
def test_every_figure_is_drawn_from_the_records_alone(folder, figures, tmp_path, monkeypatch):
    drawn, save = {}, Figure.savefig

    def kept(self, path, **options):
        drawn[path.stem] = self
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
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
    rows = list(csv.DictReader((tmp_path / "differences.csv").open()))
    blue = check_differences(drawn["differences"], rows)
    assert sum(blue) == (19 if "frontier" in folder else 0)


def check_differences(figure, rows):
    """Each bar ends where its interval does, and is blue where that leaves out 0."""
    bars = [bar for axis in figure.axes for bar in axis.containers]
    blue = []
    for bar, row in zip(bars, rows, strict=True):
        (line,) = bar.lines[2]
        (low, _), (high, _) = line.get_segments()[0]
        assert (low, high) == pytest.approx((float(row["low"]), float(row["high"])))
        blue.append(bar.lines[0].get_color() == BLUE)
        assert blue[-1] == (low > 0 or high < 0)
    return blue


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds none"):
        redraw(tmp_path)


def test_the_pictures_of_the_method_are_what_the_guides_give(tmp_path):
    main([str(tmp_path / "pictures")])
    drawn, committed = (
        list(csv.DictReader((folder / "guide.csv").open()))
        for folder in (tmp_path / "pictures", PICTURES)
    )
    assert [[number(cell) for cell in row.values()] for row in drawn] == [
        [pytest.approx(number(cell)) for cell in row.values()] for row in committed
    ]
    names = {path.name for path in PICTURES.iterdir()}
    assert names == {path.name for path in (tmp_path / "pictures").iterdir()}
    factors = {}
    for row in drawn:
        factors.setdefault(row["panel"], []).append(float(row["anchor"]) / float(row["reference"]))
    sure, undecided, token, _ = factors.values()
    assert sure == pytest.approx([1] * 6) and undecided == pytest.approx([undecided[0]] * 6)
    assert undecided[0] > 1.1 and token == sorted(token) and token[0] < token[-1]
