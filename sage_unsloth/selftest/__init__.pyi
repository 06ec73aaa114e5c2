from .checks import Check as Check
from .checks import all_checks as all_checks
from .findings import Finding as Finding
from .run import run_selftest as run_selftest

__all__ = ["Check", "Finding", "all_checks", "run_selftest"]
