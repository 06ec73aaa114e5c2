"""TRL's own trainer with its model on a GPU, which is a pretended one (`fake_gpu`)."""

from functools import partial

import pytest
from gpu_functions import ELSEWHERE, all_functions
from test_devices import COMPOSITIONS, RAN, check_step
from trl_trainer import build_trl_trainer, letters


@pytest.fixture
def make_trainer(tmp_path):
    return partial(build_trl_trainer, output_dir=str(tmp_path / "out"), reward=letters)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_step_is_the_one_on_the_cpu(make_trainer, composition, monkeypatch):
    check_step(make_trainer, composition, monkeypatch)


def test_every_function_of_trls_trainer_ran_on_the_gpu():
    open_ones = {(file, name) for file, name in all_functions(of_trl=True) - RAN}
    assert not {(file, name) for file, name in open_ones if name not in ELSEWHERE}
