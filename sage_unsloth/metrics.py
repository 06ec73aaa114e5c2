"""Moved to `sage_unsloth.evaluation.metrics`; the old names still work."""

from sage_unsloth.evaluation.metrics import *  # noqa: F403
