from .patterns import case_studies as case_studies
from .patterns import dynamics as dynamics
from .patterns import pattern_differences as pattern_differences
from .patterns import pattern_frequencies as pattern_frequencies
from .report import analyze as analyze
from .sources import find_sources as find_sources
from .traces import run_traces as run_traces

__all__ = [
    "analyze",
    "case_studies",
    "dynamics",
    "find_sources",
    "pattern_differences",
    "pattern_frequencies",
    "run_traces",
]
