"""Training in this process runs without torch.compile, which recompiles for every new shape.

Compiled training is tested in tests/patch/test_compiled.py and by the quickstart.
"""

import pytest


@pytest.fixture(scope="module", autouse=True)
def eager():
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield
