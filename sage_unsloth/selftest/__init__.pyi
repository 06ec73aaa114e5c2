from .checks import CHECKS as CHECKS
from .checks import Check as Check
from .findings import Finding as Finding
from .run import run_selftest as run_selftest

__all__ = ["CHECKS", "Check", "Finding", "run_selftest"]
