from .engines import SamplingConfig as SamplingConfig
from .engines import TransformersEngine as TransformersEngine
from .engines import VllmEngine as VllmEngine
from .record_sets import sample_and_grade as sample_and_grade

__all__ = [
    "SamplingConfig",
    "TransformersEngine",
    "VllmEngine",
    "sample_and_grade",
]
