"""An upgrade is noticed: loss and gradient at q ≡ 1 are Unsloth's own, and what they were, to the
last bit.
"""

import copy
import json
import tomllib
from pathlib import Path

import golden_loss
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sage_unsloth.patch import contract
from sage_unsloth.trainers import trainer_names
from sage_unsloth.trainers.trainer_names import ContractError

pytestmark = [pytest.mark.usefixtures("unsloth_module"), pytest.mark.compiled]
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "data" / "results" / "reliability"
ONE_STEP = dict(max_steps=1, gradient_accumulation_steps=1)


@pytest.fixture(scope="module")
def found(unsloth_module, tmp_path_factory):
    from conftest import build_trainer

    trainer = build_trainer(str(tmp_path_factory.mktemp("golden")), **ONE_STEP)
    return golden_loss.measure(unsloth_module, trainer)


def test_the_loss_is_what_it_was(found):
    records = golden_loss.read()
    assert records, "no record; python tests/golden_loss.py --record"
    assert golden_loss.compare(found, records) in ("bits", "tolerance")


def test_q_of_one_is_the_same_bits(found, make_trainer):
    guided = golden_loss.trainer_values(make_trainer(**ONE_STEP), golden_loss.Ones())
    assert golden_loss.bits(guided) == found["trainer"]
    assert len(guided) > 6 and any(row[1] > 0 for name, row in guided.items() if name != "loss")


def test_one_ulp_is_noticed(found, unsloth_module):
    """In Unsloth's own function: the smallest change of the loss, or of one token's gradient, that
    float32 can hold.
    """
    own = unsloth_module.grpo_compute_loss

    def next_loss(*arguments, **settings):
        loss, *rest = own(*arguments, **settings)
        return loss + (torch.nextafter(loss, loss + 1) - loss).detach(), *rest

    def next_gradient(ref, new, *arguments, **settings):
        step = torch.zeros_like(new)
        new.register_hook(
            lambda g: torch.where(
                step.index_fill(0, torch.tensor([0]), 1) > 0, torch.nextafter(g, g + 1), g
            )
        )
        return own(ref, new * 1, *arguments, **settings)

    here = [{"versions": golden_loss.versions(), "cpu": golden_loss.cpu(), "bits": found}]
    assert golden_loss.compare(found, here) == "bits"
    for kernel in (next_loss, next_gradient):
        other = found | {"kernel": golden_loss.bits(golden_loss.kernel_values(kernel))}
        with pytest.raises(AssertionError, match=r"kernel .*bit for bit.*golden_loss\.py --record"):
            golden_loss.compare(other, here)


def test_an_upgrade_is_judged_by_its_bits(found):
    """Other versions with the same bits pass; with another bit they fail, and the message names
    them.
    """
    before = {
        "versions": golden_loss.versions() | {"trl": "0.0.1"},
        "cpu": golden_loss.cpu(),
        "bits": copy.deepcopy(found),
    }
    assert golden_loss.compare(found, [before]) == "bits"
    digits = before["bits"]["trainer"]["loss"]
    # The last bit of a float32, which is the 29th from the right of a double.
    before["bits"]["trainer"]["loss"] = f"{int(digits, 16) ^ (1 << 29):016x}"
    with pytest.raises(AssertionError, match=r"trainer loss was .*'trl': '0.0.1 -> "):
        golden_loss.compare(found, [before])
    elsewhere = before | {"cpu": "another"}
    assert golden_loss.compare(found, [elsewhere]) == "tolerance"
    far = golden_loss.numbers(digits)[0] * (1 + 3e-5)
    elsewhere["bits"]["trainer"]["loss"] = golden_loss.bits({"loss": [far]})["loss"]
    with pytest.raises(AssertionError, match="within 1e-05"):
        golden_loss.compare(found, [elsewhere])


def test_every_tested_version_is_recorded():
    recorded = {record["versions"]["unsloth"] for record in golden_loss.read()}
    assert recorded >= set(trainer_names.TESTED_VERSIONS)


def test_the_patch_holds_on_every_python_and_on_the_oldest_torch():
    """If it fails: python tests/python_matrix.py."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = json.loads((RESULTS / "pythons.json").read_text())["rows"]
    for row in rows:
        assert row["outcome"] == "holds" and row["passed"] > 0 and row["failed"] == 0, row
        assert SpecifierSet(project["requires-python"]).contains(row["python"])
        assert row["versions"]["unsloth"] in trainer_names.TESTED_VERSIONS
    (torch_range,) = (x for x in map(Requirement, project["dependencies"]) if x.name == "torch")
    versions = {row["versions"]["torch"].split("+")[0] for row in rows}
    assert all(torch_range.specifier.contains(version) for version in versions)
    oldest = next(s.version for s in torch_range.specifier if s.operator == ">=")
    assert any(version.startswith(f"{oldest}.") for version in versions)
    assert "3.13" in {row["python"].rpartition(".")[0] for row in rows}


def test_both_ends_of_each_range_were_run():
    """If it fails: python tests/version_matrix.py --rows pinned "lowest of each range"."""
    rows = json.loads((RESULTS / "versions.json").read_text())["rows"]
    rows = {row["name"]: row for row in rows}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    exact = {x.name: x.specifier for x in map(Requirement, lines[1:])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {x.name: x.specifier for x in map(Requirement, project["dependencies"])}
    for name in ("trl", "transformers", "peft", "datasets"):
        ends = {one.operator: one.version for one in ranges[name]}
        assert set(ends) == {">=", "<="}, name
        assert f"=={ends['<=']}" == str(exact[name]), "CI has the upper end"
        assert f"{name}=={ends['>=']}" in rows["lowest of each range"]["beside"]
    for row in (rows["lowest of each range"], rows["pinned"]):
        assert row["outcome"] == "holds" and row["failed"] == 0 < row["passed"]
    for name, version in rows["pinned"]["versions"].items():
        assert name not in exact or exact[name].contains(version)
    assert set(exact) >= {"unsloth", "unsloth_zoo"}


def test_the_committed_matrix_holds_or_refuses():
    matrix = json.loads((RESULTS / "versions.json").read_text())
    rows = {row["name"]: row for row in matrix["rows"]}
    not_run = rows.pop("newest vllm")
    assert not_run["outcome"] == "not run" and not_run["beside"][0].startswith("vllm==")
    of_trl = {
        row["versions"]["trl"]: row for row in rows.values() if "unsloth" not in row["versions"]
    }
    assert set(of_trl) == set(trainer_names.TESTED_TRL_VERSIONS)
    assert all(row["outcome"] == "holds" for row in of_trl.values())
    rows = {name: row for name, row in rows.items() if "unsloth" in row["versions"]}
    outcomes = {row["versions"]["unsloth"]: row["outcome"] for row in rows.values()}
    assert set(outcomes) >= set(trainer_names.TESTED_VERSIONS)
    assert any(version.startswith("2026.9.") for version in outcomes)
    assert "newest of all" in rows
    for row in rows.values():
        assert row["outcome"] in ("holds", "refuses", "does not import"), row
        assert (row["outcome"] == "holds") is (row["failed"] == 0 and row["passed"] > 0), row
        if row["versions"]["unsloth"] in trainer_names.TESTED_VERSIONS and not row["beside"]:
            assert row["outcome"] == "holds" and not row.get("not_met")


def test_the_measured_engine_changes_a_policy_and_the_guard_notices():
    """Measured by tests/engine_lora.py with a real vLLM: alpha / r is 2 there."""
    runs = json.loads((RESULTS / "engine_lora.json").read_text())
    assert set(runs) >= set(trainer_names.TESTED_VERSIONS)
    for version, run in runs.items():
        assert run["versions"]["unsloth_zoo"] == version
        assert run["loads"] == [2.0, 4.0]
        assert run["steps"]["without"] == {"factors": [2.0, 2.0], "stopped": ""}
        assert run["steps"]["guided_kl"] == {"factors": [1.0, 1.0], "stopped": ""}
        assert run["steps"]["digest_alone"]["factors"] == [2.0]
        assert "changed 16 of 32" in run["steps"]["digest_alone"]["stopped"]


@pytest.mark.parametrize("bounded", ["before", "after", "never"])
def test_a_bounded_k3_with_its_ratio_is_that_of_a_tested_version(bounded):
    """2026.10.7 bounds k3 before the ratio, 2026.10.9 after it; no third form holds."""

    def kernel(anchor, new, old, sampling, ids, mask, beta, advantages, **settings):
        ratio = (new - new.detach()).exp()
        k3 = (anchor - new).expm1() - (anchor - new)
        if bounded == "before":
            k3 = k3.clamp(max=10)
        k3 = k3 * ratio
        if bounded == "after":
            k3 = k3.clamp(max=10)
        loss = (beta * k3 - ratio * advantages) * mask
        return ((loss.sum(1) / mask.sum(1)).mean(), *[None] * 6)

    if bounded == "never":
        with pytest.raises(ContractError, match="penalty 'k3-is'"):
            contract.check_ratio(kernel)
    else:
        contract.check_ratio(kernel)
