from .fitting import check_fits as check_fits
from .fitting import plan_setup as plan_setup
from .memory import memory_plan as memory_plan
from .plan import full_report as full_report
from .presets import CARDS as CARDS
from .presets import MODELS as MODELS
from .presets import model_preset as model_preset
from .setup import Setup as Setup
from .setup import preset_setup as preset_setup

__all__ = [
    "CARDS",
    "MODELS",
    "Setup",
    "check_fits",
    "full_report",
    "memory_plan",
    "model_preset",
    "plan_setup",
    "preset_setup",
]
