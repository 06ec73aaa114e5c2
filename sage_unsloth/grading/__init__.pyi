from .checker import Checker as Checker
from .checker import Grade as Grade
from .checker import Kind as Kind
from .checker import Verdict as Verdict
from .extraction import extract_answer as extract_answer
from .grader import Grader as Grader
from .grader import grade as grade
from .reward import SolutionReward as SolutionReward

__all__ = [
    "Checker",
    "Grade",
    "Grader",
    "Kind",
    "SolutionReward",
    "Verdict",
    "extract_answer",
    "grade",
]
