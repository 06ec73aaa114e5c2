"""Moved to `sage_unsloth.problems`: `benchmarks` and `published`; the old names still work."""

from sage_unsloth.problems.benchmarks import *  # noqa: F403
from sage_unsloth.problems.published import *  # noqa: F403
