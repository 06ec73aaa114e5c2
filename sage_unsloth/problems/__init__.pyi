from .benchmarks import load_benchmark as load_benchmark
from .columns import Columns as Columns
from .corpora import rl_corpus as rl_corpus
from .corpora import sft_corpus as sft_corpus

__all__ = [
    "Columns",
    "load_benchmark",
    "rl_corpus",
    "sft_corpus",
]
