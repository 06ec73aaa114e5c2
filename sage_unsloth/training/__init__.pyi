from .algorithm_rows import ALGORITHMS as ALGORITHMS
from .algorithms import Algorithm as Algorithm
from .algorithms import get_algorithm as get_algorithm
from .algorithms import listing as listing
from .card_plan import plan_for_card as plan_for_card
from .figures import plot_training as plot_training
from .live import LivePlot as LivePlot
from .outcomes import course as course
from .recipes import run_rlvr as run_rlvr
from .rlvr_config import RlvrConfig as RlvrConfig
from .rlvr_job import resolve as resolve
from .rlvr_stage import rlvr as rlvr
from .rlvr_stage import run_job as run_job
from .sft_recipe import run_sft as run_sft
from .sft_stage import SftConfig as SftConfig
from .sft_stage import sft as sft
from .sft_stage import sft_trainer_class as sft_trainer_class
from .show_completions import ShowCompletions as ShowCompletions
from .stage import read_metrics as read_metrics

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "LivePlot",
    "RlvrConfig",
    "SftConfig",
    "ShowCompletions",
    "course",
    "get_algorithm",
    "listing",
    "plan_for_card",
    "plot_training",
    "read_metrics",
    "resolve",
    "rlvr",
    "run_job",
    "run_rlvr",
    "run_sft",
    "sft",
    "sft_trainer_class",
]
