"""TRL's own trainer, resumed behind its first pass, takes the rows in the order of a whole run."""

from functools import partial

import pytest
from ordering import check_order_is_kept
from trl_trainer import build_trl_trainer, letters


@pytest.mark.parametrize("after", [2, 4])
def test_a_resumed_run_keeps_the_order(tmp_path, after):
    make = partial(build_trl_trainer, output_dir=str(tmp_path / "out"), reward=letters)
    check_order_is_kept(make, after)
