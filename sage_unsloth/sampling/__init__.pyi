from .engine_choice import choose_rollouts as choose_rollouts
from .engines import SamplingConfig as SamplingConfig
from .engines import TransformersEngine as TransformersEngine
from .record_sets import sample_and_grade as sample_and_grade
from .vllm_engine import VllmEngine as VllmEngine

__all__ = [
    "SamplingConfig",
    "TransformersEngine",
    "VllmEngine",
    "choose_rollouts",
    "sample_and_grade",
]
