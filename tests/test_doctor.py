"""`doctor` names what is there, what is missing, and the remedy; and the package stays light until
it is used.
"""

import importlib.metadata
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from sage_unsloth import doctor


def test_every_check_has_a_status_and_every_trouble_a_remedy(unsloth_module):
    lines = []
    failures = doctor.run_checks(lines.append)
    text = "\n".join(lines)
    assert failures == 0, text
    for name in (
        "python",
        "unsloth",
        "trl",
        "vllm",
        "memory",
        "device",
        "embedded model",
        "grader",
        "programs",
        "patch contract",
    ):
        assert name in text
    assert f"holds on unsloth {importlib.metadata.version('unsloth')}" in text
    for check in doctor.checks():
        assert check.status in (doctor.OK, doctor.WARN, doctor.FAIL)
        assert check.status == doctor.OK or check.remedy, check


def test_a_wrong_version_and_a_missing_package_are_named(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "datasets":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0.0" if name == "trl" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {check.name: check for check in doctor._packages()}
    assert found["trl"].status == doctor.FAIL
    assert found["trl"].detail.startswith("1.0.0, but tested with ")
    assert found["trl"].remedy.startswith('pip install "trl')
    assert Requirement(found["trl"].remedy.split('"')[1]).specifier.contains(real("trl"))
    assert found["datasets"].status == doctor.FAIL
    assert found["datasets"].remedy.startswith('pip install "datasets')


def test_a_broken_contract_is_a_failure(monkeypatch):
    from sage_unsloth.trainers import trainer_names

    monkeypatch.setitem(trainer_names.EXPECTED_PARAMETERS, trainer_names.LOSS, ("trainer", "ids"))
    check = doctor._contract()
    assert check.status == doctor.FAIL
    assert "delete the folder" in check.remedy


def test_a_missing_base_model_is_a_failure(monkeypatch, tmp_path):
    from sage_unsloth.models import embedded

    monkeypatch.setattr(embedded, "data_folder", lambda: tmp_path)
    check = doctor._base_model()
    assert check.status == doctor.FAIL
    assert "git checkout data/arithmetic-base" in check.remedy


@pytest.mark.parametrize(
    "module",
    [
        "sage_unsloth",
        "sage_unsloth.evaluation.metrics",
        "sage_unsloth.grading.grader",
        "sage_unsloth.figures",
    ],
)
def test_light_modules_import_neither_torch_nor_unsloth(module):
    script = (
        f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'unsloth', "
        f"'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_public_names_are_there():
    import sage_unsloth

    for name in sage_unsloth.__all__:
        assert getattr(sage_unsloth, name) is not None
    with pytest.raises(AttributeError, match="attribute nothing"):
        _ = sage_unsloth.nothing
