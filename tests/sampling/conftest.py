"""The tiny base model, loaded once for all tests of this folder."""

import pytest
from table_engine import BASE

from sage_unsloth.models.loading import load_policy
from sage_unsloth.sampling.engines import TransformersEngine


@pytest.fixture(scope="session")
def engine(unsloth_module):
    return TransformersEngine(*load_policy(BASE))
