"""What a guide costs: one loss is compared, and what is measured is measured right."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from research.cost import measurements, sizes
from research.cost import report as cost_report
from research.cost.command import main
from research.cost.phases import timed_phases
from research.cost.run import measure_costs
from research.cost.sizes import Size
from research.cost.variants import Variant, choose_variants
from sage_unsloth.models import meter
from sage_unsloth.training.algorithms import ALGORITHMS

NAMES = ["sage-branch", "materialised"]
GUIDED = ["sage-random", "sage-token", "sage-branch"]
TINY = Size(hidden=64, vocabulary=400, length=6, batch=8)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One real run: loss and whole step."""
    folder = tmp_path_factory.mktemp("cost")
    return measure_costs(folder, [TINY], names=NAMES, rounds=2, steps=1), folder


def test_every_variant_is_measured_and_written_down(report):
    report, folder = report
    names = ["grpo", *NAMES]
    assert [row["variant"] for row in report["loss"]] == names
    assert [row["variant"] for row in report["step"]] == names * 2
    for row in report["loss"]:
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert (row["guide_share"] > 0) == (row["variant"] not in ("grpo", "materialised"))
    assert report["loss"][0]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    for row in report["step"]:
        assert sum(row["shares"].values()) == pytest.approx(1, abs=1e-3)
        assert row["shares"]["rollout"] > 0.1
    packages = report["environment"]["packages"]
    assert packages["unsloth"] and packages["torch"] and report["device"]
    assert json.loads((folder / "bench.json").read_text()) == report
    assert {"bench.json", "bench.png", "bench.csv"} == {path.name for path in folder.iterdir()}


def test_the_materialised_loss_is_the_guided_one(report):
    """Else the comparison would be of two different things."""
    losses = {row["variant"]: row["loss"] for row in report[0]["loss"]}
    assert losses["sage-branch"] == pytest.approx(losses["materialised"], rel=1e-5)
    assert abs(losses["sage-branch"] - losses["grpo"]) > 1e-4, (
        "a guide that does nothing proves nothing"
    )


def test_every_variant_draws_the_same_rollouts(report):
    for task in {row["task"] for row in report[0]["step"]}:
        rows = [row for row in report[0]["step"] if row["task"] == task]
        tokens = {round(row["tokens_per_second"] * row["seconds"][0]) for row in rows}
        assert max(tokens) - min(tokens) <= 0.01 * max(tokens)


def test_variants_come_from_the_table_of_algorithms():
    found = {row.name: row for row in choose_variants()}
    assert list(found) == ["grpo", *GUIDED, "materialised"]
    assert all(found[name].guide is ALGORITHMS[name].guide for name in GUIDED)
    assert found["grpo"] == Variant(name="grpo")
    chosen = choose_variants(["grpo-reverse-kl", "materialised"])
    assert [(row.name, row.kl_estimator, row.materialised) for row in chosen] == [
        ("grpo", "k3", False),
        ("grpo-reverse-kl", "k3-is", False),
        ("materialised", "k3", True),
    ]
    (_, exact) = choose_variants(["sage-branch-exact"])
    assert (exact.guide, exact.kl_estimator, exact.credit) == (
        ALGORITHMS["sage-branch-exact"].guide,
        "k3-is",
        "sequence",
    )


def test_the_baseline_stays_unsloths_own_beside_one_pass():
    rows = choose_variants(["one-pass", "sage-token"], one_pass=True)
    assert [(row.name, row.one_pass, row.guide is None) for row in rows] == [
        ("grpo", False, True),
        ("one-pass", True, True),
        ("sage-token", True, False),
    ]
    assert not any(row.one_pass for row in choose_variants())


@pytest.mark.parametrize(
    "choice", [{"names": ["one-pass"]}, {"names": ["materialised"]}, {"one_pass": True}]
)
def test_what_is_of_unsloths_loss_is_not_compared_with_trls(choice):
    assert [row.name for row in choose_variants(backend="trl")] == ["grpo", *GUIDED]
    with pytest.raises(ValueError, match="need Unsloth's loss, got backend='trl'"):
        choose_variants(**choice, backend="trl")


@pytest.mark.long
def test_trls_own_loss_is_measured_in_a_process_without_unsloth(tmp_path):
    command = [sys.executable, "-m", "research.cost", "--backend", "trl", "--out", str(tmp_path)]
    size = ["--hidden", "64", "--vocabulary", "400", "--length", "6"]
    done = subprocess.run(
        [*command, *size, "--rounds", "1", "--steps", "0", "--variants", "sage-branch"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [row["variant"] for row in report["loss"]] == ["grpo", "sage-branch"]
    assert report["loss"][0]["loss"] != report["loss"][1]["loss"]
    assert "unsloth" not in cost_report.conditions(report)


@pytest.mark.parametrize("name", ["dapo-sage-branch", "grpo-no-kl", "sage-teacher"])
def test_a_variant_that_differs_in_more_is_refused(name):
    with pytest.raises(ValueError, match=f"advantages and β and no teacher, but '{name}' has"):
        choose_variants([name])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--variants", "sage"], "sage-branch"),
        (["--length", "0"], "length must be at least 1"),
        (["--batch", "12"], "batch must be a multiple of 8"),
        (["--rounds", "0"], "must be at least 1"),
    ],
)
def test_bad_flags_are_a_message_and_leave_nothing(flags, message, tmp_path, capsys):
    assert main(["--small", *flags, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_left_out_and_said(make_trainer, monkeypatch, caplog):
    monkeypatch.setattr(measurements, "fits", lambda size: False)
    trainer = make_trainer(num_generations=8)
    size = Size(hidden=48, vocabulary=41, length=6, batch=8)
    place = SimpleNamespace(trainer=lambda size: trainer)
    with caplog.at_level("INFO"):
        rows = measurements.measure_loss(place, size, choose_variants(["materialised"]), 1)
    assert [row["seconds"] is None for row in rows] == [False, True]
    assert "materialised needs about" in caplog.text
    assert (
        cost_report.loss_table({"loss": rows, "device": "2 cores"})[1]["seconds"] == "not fitting"
    )


def test_memory_that_is_free_decides_what_fits(monkeypatch):
    monkeypatch.setattr(sizes.os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.get)
    numbers = 1000 * 4096 // (sizes.LOGITS_HELD * sizes.FLOAT32)
    assert not sizes.fits(Size(hidden=64, vocabulary=numbers, length=1, batch=1))
    assert sizes.fits(Size(hidden=64, vocabulary=numbers - 1, length=1, batch=1))


def test_growth_goes_to_the_size_that_was_asked_for(monkeypatch):
    measured, settings = [], []

    def measure_loss(place, size, chosen, rounds):
        measured.append((size.length, size.batch, size.vocabulary))
        return [{"variant": row.name, "seconds": [1.0]} for row in chosen]

    monkeypatch.setattr(measurements, "measure_loss", measure_loss)
    monkeypatch.setattr(
        measurements, "one_step", lambda trainer, variant: {"seconds": 2.0, "phases": {}}
    )
    place = SimpleNamespace(trainer=lambda size, **s: settings.append((size.length, s)))
    rows = measurements.measure_growth(
        place, Size(hidden=64, vocabulary=400, length=80, batch=8), choose_variants()
    )
    assert measured == [
        (20, 8, 400),
        (40, 8, 400),
        (80, 8, 400),
        (80, 2, 400),
        (80, 4, 400),
        (80, 8, 400),
        (80, 8, 100),
        (80, 8, 200),
        (80, 8, 400),
    ]
    assert settings == [
        (32, {name: value})
        for name in ("num_iterations", "gradient_accumulation_steps")
        for value in (1, 2, 4)
    ]
    assert {row["variant"] for row in rows} == {"grpo", "sage-branch", "materialised"}
    assert cost_report.growth_table({"growth": rows})[0] == {
        "grows": "length",
        "to": "20",
        "variant": "grpo",
        "seconds": "1",
        "peak MiB": "",
    }


# --- meters ---------------------------------------------------------------------------------------


PEAKS = """
import torch
from sage_unsloth.models import meter

for mebibytes in (512, 128):
    with meter.measure() as found:
        first = torch.ones(mebibytes * 2**18 // 2)
        del first
        second = torch.ones(mebibytes * 2**18)
        del second
    print(found["peak_bytes"] / 2**20)
"""


@pytest.mark.skipif(meter.memory_source() != meter.RESIDENT, reason="needs Linux, and no GPU")
def test_the_peak_is_what_was_held_at_once():
    """In a process of its own: what an allocator gives back at once depends on what it has been
    through.
    """
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    peaks = [float(line) for line in done.stdout.split()]
    assert peaks == [pytest.approx(512, abs=24), pytest.approx(128, abs=24)]


def test_a_phase_within_another_counts_once():
    def reference():
        time.sleep(0.02)

    trainer = SimpleNamespace(
        _generate=lambda: time.sleep(0.05),
        _calculate_rewards=lambda: None,
        compute_loss=lambda: None,
        accelerator=SimpleNamespace(backward=lambda: None),
    )
    trainer._get_per_token_logps_and_entropies = reference
    trainer.compute_loss = lambda: [trainer._get_per_token_logps_and_entropies(), time.sleep(0.01)]
    before = dict(vars(trainer))
    with timed_phases(trainer) as seconds:
        trainer._generate()
        trainer.compute_loss()
    assert seconds["rollout"] >= 0.05 and seconds["reference"] >= 0.02
    assert 0.01 <= seconds["loss"] < seconds["reference"]
    assert vars(trainer) == before


def test_every_variant_comes_first_once():
    assert [measurements.rotated("abc", number) for number in range(4)] == [
        [*"abc"],
        [*"bca"],
        [*"cab"],
        [*"abc"],
    ]


def test_ratios_are_of_one_round_and_shares_of_one_step():
    base = [
        {"seconds": s, "cpu_seconds": 1.0, "peak_bytes": 2**20, "loss": 0.0, "guide_seconds": 0.0}
        for s in (1.0, 2.0, 10.0)
    ]
    other = [
        {"seconds": s, "cpu_seconds": s / 2, "peak_bytes": 2**21, "loss": 0.5, "guide_seconds": 0.1}
        for s in (2.0, 3.0, 10.0)
    ]
    row = measurements._loss_row(TINY, "x", {"grpo": base, "x": other})
    # Ratios 2, 1.5, 1; the ratio of the medians, 3 / 2, is the same here, of the means it is not.
    assert row["ratio"] == {"median": 1.5, "low": 1.25, "high": 1.75}
    assert row["cpu_ratio"] == {"median": 1.5, "low": 1.25, "high": 3.25}
    assert row["peak_mib"] == 2.0 and row["loss"] == 0.5
    assert row["guide_share"] == pytest.approx(0.1 / 3, abs=1e-6)
    assert cost_report.quartiles([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0}
