from .algorithm_rows import ALGORITHMS as ALGORITHMS
from .algorithms import Algorithm as Algorithm
from .algorithms import get_algorithm as get_algorithm
from .algorithms import listing as listing
from .card_plan import plan_for_card as plan_for_card
from .figures import plot_training as plot_training
from .live import LivePlot as LivePlot
from .outcomes import training_curve_rows as training_curve_rows
from .recipes import run_rlvr as run_rlvr
from .rlvr_config import RlvrConfig as RlvrConfig
from .rlvr_job import resolve_rlvr as resolve_rlvr
from .rlvr_stage import rlvr as rlvr
from .rlvr_stage import run_rlvr_job as run_rlvr_job
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
    "get_algorithm",
    "listing",
    "plan_for_card",
    "plot_training",
    "read_metrics",
    "resolve_rlvr",
    "rlvr",
    "run_rlvr",
    "run_rlvr_job",
    "run_sft",
    "sft",
    "sft_trainer_class",
    "training_curve_rows",
]
