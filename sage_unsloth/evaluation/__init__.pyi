from .bootstrap import mean_difference as mean_difference
from .bootstrap import mean_interval as mean_interval
from .evaluator import evaluate_models as evaluate_models
from .intervals import Difference as Difference
from .intervals import Estimate as Estimate
from .intervals import paired_interval as paired_interval
from .intervals import score_interval as score_interval
from .metrics import difference_curve as difference_curve
from .metrics import paired_difference as paired_difference
from .metrics import pass_at_k as pass_at_k
from .metrics import pass_at_k_curve as pass_at_k_curve
from .metrics import pass_at_k_interval as pass_at_k_interval
from .report import compare_sets as compare_sets
from .report_text import interval_text as interval_text

__all__ = [
    "Difference",
    "Estimate",
    "compare_sets",
    "difference_curve",
    "evaluate_models",
    "interval_text",
    "mean_difference",
    "mean_interval",
    "paired_difference",
    "paired_interval",
    "pass_at_k",
    "pass_at_k_curve",
    "pass_at_k_interval",
    "score_interval",
]
