"""The soak's readings of a process, its slopes, and a small soak of the real command."""

import subprocess
import sys

import numpy as np
import pytest

from research.soak import SERIES, SETTINGS, _look, report, slope, summary, watch

HOLDS = """
import subprocess, sys, tempfile, threading, time
files = [tempfile.TemporaryFile() for _ in range(int(sys.argv[1]))]
kept = bytearray(b"x") * (int(sys.argv[2]) << 20)
waits = "import sys; print(1, flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-S", "-c", waits], stdin=-1, stdout=-1)
child.stdout.readline()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
child.communicate()
"""


def held(files, mebibytes):
    command = [sys.executable, "-S", "-c", HOLDS, str(files), str(mebibytes)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        process.stdout.readline()
        look = _look(process.pid)
        process.communicate("")
    return look, process.pid


def test_a_process_is_read_from_outside():
    (few, _), (many, process) = held(1, 1), held(11, 101)
    assert many["handles"] - few["handles"] == 10
    assert many["rss"] - few["rss"] == pytest.approx(100, abs=5)
    assert (many["threads"], many["children"]) == (2, 1)
    assert many["rss_children"] > 3
    assert _look(process) is None


def series(count=100, **growth):
    """Rows that are flat but for `growth`, a series' increase in 1,000 steps."""
    noise = np.random.default_rng(0).normal(size=(count, len(SERIES)))
    flat = dict(
        rss=1000.0,
        rss_children=60.0,
        handles=4.0,
        threads=5.0,
        children=1.0,
        cpu_per_step=0.4,
        clock_per_step=0.5,
        folder=1.0,
        checkpoints=2.0,
    )
    whole = ("handles", "threads", "children", "checkpoints")
    rows = []
    for i in range(count):
        step = 25 * (i + 1)
        row = {"step": step}
        for k, (name, value) in enumerate(flat.items()):
            value *= 1 + (0 if name in whole else 0.001 * noise[i, k])
            grown = growth.get(name, 0.0) * step / 1000
            row[name] = value + (int(grown) if name in whole else grown)
        rows.append(row)
    return rows


def test_what_grows_is_not_flat():
    assert all(report(series())["flat"].values())
    for name, growth in (
        ("rss", 2.0),
        ("rss_children", 2.0),
        ("handles", 1.0),
        ("threads", 1.0),
        ("children", 1.0),
        ("cpu_per_step", 0.05),
    ):
        result = report(series(**{name: growth}))
        assert [k for k, flat in result["flat"].items() if not flat] == [name]
        assert result["series"][name]["per_1000_steps"][0] == pytest.approx(growth, rel=0.5)
        assert f"{name:<15}" in summary(result) and "NOT FLAT" in summary(result)
    with pytest.raises(ValueError, match="at least 20 windows, got 19"):
        report(series(19))


def test_a_slope_is_least_squares_and_its_interval_covers():
    x = np.arange(50.0)
    assert slope(x, 3 * x + 1) == pytest.approx((3, 3, 3))
    rng, covered = np.random.default_rng(1), 0
    for _ in range(100):
        noise = np.zeros(150)
        for t in range(1, 150):  # neighbours resemble each other
            noise[t] = 0.5 * noise[t - 1] + rng.normal()
        y = 0.1 * np.arange(150) + noise
        estimate, low, high = slope(np.arange(150), y, resamples=400)
        assert estimate == pytest.approx(np.polyfit(np.arange(150), y, 1)[0])
        covered += low <= 0.1 <= high
    assert 85 <= covered <= 100


@pytest.mark.long
def test_a_small_soak(tmp_path):
    """The real command for 24 steps: nothing is left open or running, and memory does not run
    away.
    """
    settings = [s for s in SETTINGS if not s.startswith("save_steps")]
    rows = watch(tmp_path / "soak", 24, 4, 1.0, [*settings, "save_steps=4", "preflight_prompts=0"])
    log = (tmp_path / "soak" / "train.log").read_text()
    assert len(rows) >= 3 and rows[-1]["step"] <= 24, log[-3000:]
    assert (tmp_path / "soak" / "run" / "adapter").is_dir()
    first, last = rows[0], rows[-1]
    for name in ("handles", "threads"):
        assert last[name] <= first[name] + 2, (name, rows)  # a checkpoint may be open at the moment
    assert all(row["checkpoints"] <= 3 and row["children"] <= 1 for row in rows)
    assert last["rss"] - first["rss"] < 100
    assert all(0 < row["cpu_per_step"] < 3600 and row["folder"] > 0 for row in rows)
    with pytest.raises(ValueError, match="must be an empty folder"):
        watch(tmp_path / "soak", 24, 4, 1.0)
