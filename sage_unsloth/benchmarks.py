"""Moved to `sage_unsloth.problems.benchmarks`; the old names still work."""

from sage_unsloth.problems.benchmarks import *  # noqa: F403
from sage_unsloth.problems.published import KNIGHTS_REVISION, PEOPLE  # noqa: F401
