from .evaluation import pass_at_k as pass_at_k
from .figures import show_table as show_table
from .front import ask as ask
from .front import compare as compare
from .front import evaluate as evaluate
from .front import grpo_config as grpo_config
from .front import load_dataset as load_dataset
from .front import preview as preview
from .front import record_run as record_run
from .front import rewards as rewards
from .front import save as save
from .front import train as train
from .grading import Grade as Grade
from .grading import Grader as Grader
from .grading import Reward as Reward
from .grading import SolutionReward as SolutionReward
from .grading import extract_answer as extract_answer
from .grading import get_verifier as get_verifier
from .grading import grade as grade
from .methods import AdaptiveGuide as AdaptiveGuide
from .methods import TeacherGuide as TeacherGuide
from .methods import dynamic_sampling as dynamic_sampling
from .models import LoraSettings as LoraSettings
from .models import load_policy as load_policy
from .objective import BranchGuide as BranchGuide
from .objective import CosineSchedule as CosineSchedule
from .objective import Guide as Guide
from .objective import RandomGuide as RandomGuide
from .objective import TokenGuide as TokenGuide
from .objective import TokenSignals as TokenSignals
from .objective import grpo_loss as grpo_loss
from .objective import k3 as k3
from .patch import guided_kl as guided_kl
from .patch import one_pass_loss as one_pass_loss
from .problems import load_benchmark as load_benchmark
from .sampling import choose_rollouts as choose_rollouts
from .trainers import ContractError as ContractError
from .trainers import load_unsloth as load_unsloth
from .training import plan_for_card as plan_for_card

__version__: str
__all__ = [
    "AdaptiveGuide",
    "BranchGuide",
    "ContractError",
    "CosineSchedule",
    "Grade",
    "Grader",
    "Guide",
    "LoraSettings",
    "RandomGuide",
    "Reward",
    "SolutionReward",
    "TeacherGuide",
    "TokenGuide",
    "TokenSignals",
    "__version__",
    "ask",
    "choose_rollouts",
    "compare",
    "dynamic_sampling",
    "evaluate",
    "extract_answer",
    "get_verifier",
    "grade",
    "grpo_config",
    "grpo_loss",
    "guided_kl",
    "k3",
    "load_benchmark",
    "load_dataset",
    "load_policy",
    "load_unsloth",
    "one_pass_loss",
    "pass_at_k",
    "plan_for_card",
    "preview",
    "record_run",
    "rewards",
    "save",
    "show_table",
    "train",
]
