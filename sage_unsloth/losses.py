"""Moved to `sage_unsloth.objective`: kl, credit and loss; the old names still
work, but `check_credit`, which is part of `objective.choices.check_choices`.
"""

from sage_unsloth.objective.credit import *  # noqa: F403
from sage_unsloth.objective.kl import *  # noqa: F403
from sage_unsloth.objective.loss import *  # noqa: F403
