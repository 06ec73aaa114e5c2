from .checker import Checker as Checker
from .checker import Grade as Grade
from .checker import Kind as Kind
from .checker import Verdict as Verdict
from .extraction import extract_answer as extract_answer
from .grader import Grader as Grader
from .grader import grade as grade
from .reward import SolutionReward as SolutionReward
from .reward_functions import Reward as Reward
from .verifiers import get_verifier as get_verifier

__all__ = [
    "Checker",
    "Grade",
    "Grader",
    "Kind",
    "Reward",
    "SolutionReward",
    "Verdict",
    "extract_answer",
    "get_verifier",
    "grade",
]
