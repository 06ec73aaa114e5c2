"""Moved to `sage_unsloth.evaluation`; the old names still work."""

from sage_unsloth.evaluation.bootstrap import *  # noqa: F403
from sage_unsloth.evaluation.metrics import *  # noqa: F403
