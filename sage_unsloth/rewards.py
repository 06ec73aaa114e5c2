"""Moved to `sage_unsloth.grading`, a module for each part; the old names
still work, but `own_grade`, which is `grading.grader.own_grades` of many.
"""

from sage_unsloth.grading.checker import *  # noqa: F403
from sage_unsloth.grading.extraction import *  # noqa: F403
from sage_unsloth.grading.grader import *  # noqa: F403
from sage_unsloth.grading.mathematics import *  # noqa: F403
from sage_unsloth.grading.reward import *  # noqa: F403
