"""The grid of thresholds and ratios: its report by hand, refusals, and a run of seconds that
grows.
"""

import numpy as np
import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.lab.grid import plan
from sage_unsloth.lab.grid_design import GridConfig
from sage_unsloth.lab.grid_report import make_report, noise_of, summary
from sage_unsloth.quickstart import smoke_config

RUN = smoke_config()
ROWS = [{"id": "a", "family": "usual"}, {"id": "b", "family": "rare"}]


def config(**changes):
    return GridConfig(**({"thresholds": (1.2,), "ratios": (0.1, 0.3), "run": RUN} | changes))


def test_runs_of_a_grid():
    runs = config(seeds=(1, 2), floor_seeds=(1, 2, 3)).runs()
    assert list(runs) == [
        "grpo_seed-1",
        "grpo_seed-2",
        "grpo_seed-3",
        "threshold-1.2_ratio-0.1_seed-1",
        "threshold-1.2_ratio-0.3_seed-1",
        "threshold-1.2_ratio-0.1_seed-2",
        "threshold-1.2_ratio-0.3_seed-2",
    ]
    assert runs["grpo_seed-3"][0].ratio == 0
    guide, seed = runs["threshold-1.2_ratio-0.3_seed-2"]
    assert (guide.threshold, guide.ratio, seed) == (1.2, 0.3, 2)


def test_report_by_hand():
    """Of 4 samples of two problems: GRPO solves (2, 0) and (4, 0), the cells (3, 0) and (2, 1)."""
    counts = {
        "grpo_seed-1": np.array([2, 0]),
        "grpo_seed-2": np.array([4, 0]),
        "threshold-1.2_ratio-0.1_seed-1": np.array([3, 0]),
        "threshold-1.2_ratio-0.3_seed-1": np.array([2, 1]),
    }
    routes = dict(zip(counts, (0.1, 0.3, 0.0, 0.25), strict=True))
    report = make_report(config(seeds=(1,), floor_seeds=(1, 2)), ROWS, counts, routes)
    assert report["k"] == 4
    floor = report["floor"]["pass@1"]
    assert floor["values"] == pytest.approx([0.25, 0.5])
    assert (floor["mean"], floor["deviation"]) == pytest.approx(
        (0.375, np.std([0.25, 0.5], ddof=1))
    )
    first, second = report["cells"]
    assert first["values"]["pass@1"]["mean"] == pytest.approx(0.375)
    assert first["differences"]["pass@1"]["mean"] == pytest.approx(0.125), (
        "to GRPO's seed 1, not to the mean of seeds"
    )
    assert second["differences"]["pass@4"]["mean"] == pytest.approx(0.5)
    assert second["differences"]["pass@4 of rare problems"]["mean"] == 1.0
    assert report["floor"]["rare_way"]["mean"] == pytest.approx(0.2)
    assert [row["rare_way"] for row in report["table"]] == [0.0, 0.25]
    text = summary(report)
    assert "pass@1: plain GRPO 0.375 ± 0.177 (2 seeds)" in text
    assert "+0.125 [" in text
    one = make_report(config(seeds=(1,), floor_seeds=(1,)), ROWS, counts, routes)
    assert "one seed: its noise is unknown" in summary(one)
    # Two values .25 apart have a deviation of .25 / sqrt(2), with one degree of freedom: two seeds
    # differ by 12.71 * .25.
    assert noise_of(floor, 1) == pytest.approx(12.7062 * 0.25, rel=1e-5)
    assert noise_of(floor, 4) == pytest.approx(12.7062 * 0.25 / 2, rel=1e-5)
    assert noise_of(floor | {"values": [0.0] * 3}, 1) == pytest.approx(4.30265 * 0.25, rel=1e-5)
    assert noise_of(floor | {"deviation": 0.0}, 1) is None, "seeds that agree exactly show nothing"
    assert "pass@1 3.177" in text and "pass@1 unknown" in summary(one)


def test_plan_counts_what_is_left(tmp_path):
    (tmp_path / "grpo_seed-3407" / "adapter").mkdir(parents=True)
    text = plan(config(), tmp_path)
    assert "5 runs of 2 steps x 8 completions, 1 of them trained" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(thresholds=()), "thresholds must be different values, at least one"),
        (dict(ratios=(0.1, 0.1)), "ratios must be different values"),
        (dict(ratios=(0.0,)), "a ratio of 0 is plain GRPO"),
        (dict(thresholds=(-1.0,)), "threshold must be finite and >= 0"),
        (dict(seeds=(1,), floor_seeds=(2,)), "with every seed of the cells"),
    ],
)
def test_bad_grids_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_bad_input_is_a_message_and_exit_code_2(tmp_path, capsys):
    assert main(["grid", "--ratios", "0", "--out", str(tmp_path / "g")]) == 2
    assert "a ratio of 0 is plain GRPO" in capsys.readouterr().err
    assert not (tmp_path / "g").exists()


@pytest.mark.slow
def test_a_grid_grows_by_the_cells_that_are_missing(unsloth_module, tmp_path, capsys):
    out = tmp_path / "grid"
    command = ["grid", "--smoke", "--thresholds", "0.1", "--floor-seeds", "1", "--out", str(out)]
    assert main([*command, "--ratios", "0.5"]) == 0
    text = capsys.readouterr().out
    assert (
        "Estimate:" in text
        and "2 runs of 2 steps" in text
        and "Next: python -m sage_unsloth analyze" in text
    )
    weights = out / "threshold-0.1_ratio-0.5_seed-3407" / "adapter" / "adapter_model.safetensors"
    before = weights.stat().st_mtime_ns
    for name in ("grid.json", "table.csv", "grid.csv", "grid.png"):
        assert (out / name).stat().st_size > 50
    assert "difference" in (out / "table.csv").read_text()
    assert (out / "grid.csv").read_text().startswith("panel,threshold,ratio,mean,low,high")
    assert main([*command, "--ratios", "0.5", "1.0"]) == 0
    assert "3 runs of 2 steps x 8 completions, 2 of them trained" in capsys.readouterr().out
    assert weights.stat().st_mtime_ns == before
    assert len((out / "table.csv").read_text().splitlines()) == 3
    # The guide reached the trainer, and plain GRPO had none.
    touched = {}
    for folder in out.glob("*_seed-3407"):
        last = (folder / "metrics.jsonl").read_text().splitlines()[0]
        touched[folder.name.split("_seed")[0]] = '"sage/share_touched": 0.0,' not in last
    assert touched == {
        "grpo": False,
        "threshold-0.1_ratio-0.5": True,
        "threshold-0.1_ratio-1": True,
    }
    # Another number of steps is another grid.
    assert main([*command, "--ratios", "0.5", "--steps", "3"]) == 2
    assert "rlvr.max_steps was 2 and is 3" in capsys.readouterr().err
