"""`pytest -m gpu`: the checks of `doctor --deep` on the card of this machine."""

import pytest

from sage_unsloth.selftest.checks import all_checks
from sage_unsloth.selftest.findings import FAILED, NOT_HERE
from sage_unsloth.selftest.process import run_in_process


@pytest.mark.gpu
@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.name)
def test_check(check):
    found = list(run_in_process(check, check.limit))
    if found[0].status == NOT_HERE:
        pytest.skip(found[0].found)
    wrong = [f"{f.name}: {f.found}" for f in found if f.status == FAILED]
    assert found and not wrong, wrong
