from .data import TrainingData as TrainingData
from .data import load_dataset as load_dataset
from .data import rewards as rewards
from .previews import Preview as Preview
from .previews import preview as preview
from .results import Report as Report
from .results import ask as ask
from .results import compare as compare
from .results import evaluate as evaluate
from .results import save as save
from .trainers import Recording as Recording
from .trainers import grpo_config as grpo_config
from .trainers import record_run as record_run
from .trainers import train as train

__all__ = [
    "Preview",
    "Recording",
    "Report",
    "TrainingData",
    "ask",
    "compare",
    "evaluate",
    "grpo_config",
    "load_dataset",
    "preview",
    "record_run",
    "rewards",
    "save",
    "train",
]
