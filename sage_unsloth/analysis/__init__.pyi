from .figures import plot_dynamics as plot_dynamics
from .figures import plot_patterns as plot_patterns
from .figures import plot_perplexity as plot_perplexity
from .figures import plot_trace as plot_trace
from .patterns import ARITHMETIC_PATTERNS as ARITHMETIC_PATTERNS
from .patterns import CASE_RULE as CASE_RULE
from .patterns import PATTERNS as PATTERNS
from .patterns import case_studies as case_studies
from .patterns import dynamics as dynamics
from .patterns import pattern_differences as pattern_differences
from .patterns import pattern_frequencies as pattern_frequencies
from .perplexity import load_scorer as load_scorer
from .perplexity import perplexities as perplexities
from .perplexity import perplexity_table as perplexity_table
from .perplexity import score_records as score_records
from .report import analyze as analyze
from .report import pass_at_k_curves as pass_at_k_curves
from .sources import find_sources as find_sources
from .sources import problem_texts as problem_texts
from .tables import pattern_rows as pattern_rows
from .tables import perplexity_rows as perplexity_rows
from .tables import phase_rows as phase_rows
from .token_page import case_page as case_page
from .token_page import case_table as case_table
from .token_page import trace_page as trace_page
from .traces import run_traces as run_traces

__all__ = [
    "ARITHMETIC_PATTERNS",
    "CASE_RULE",
    "PATTERNS",
    "analyze",
    "case_page",
    "case_studies",
    "case_table",
    "dynamics",
    "find_sources",
    "load_scorer",
    "pass_at_k_curves",
    "pattern_differences",
    "pattern_frequencies",
    "pattern_rows",
    "perplexities",
    "perplexity_rows",
    "perplexity_table",
    "phase_rows",
    "plot_dynamics",
    "plot_patterns",
    "plot_perplexity",
    "plot_trace",
    "problem_texts",
    "run_traces",
    "score_records",
    "trace_page",
]
