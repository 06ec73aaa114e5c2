from .algorithm_rows import ALGORITHMS as ALGORITHMS
from .algorithms import Algorithm as Algorithm
from .algorithms import get_algorithm as get_algorithm
from .live import LivePlot as LivePlot
from .recipes import run_rlvr as run_rlvr
from .recipes import run_sft as run_sft
from .rlvr_config import RlvrConfig as RlvrConfig
from .rlvr_stage import rlvr as rlvr
from .sft_stage import SftConfig as SftConfig
from .sft_stage import sft as sft
from .stage import read_metrics as read_metrics

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "LivePlot",
    "RlvrConfig",
    "SftConfig",
    "get_algorithm",
    "read_metrics",
    "rlvr",
    "run_rlvr",
    "run_sft",
    "sft",
]
