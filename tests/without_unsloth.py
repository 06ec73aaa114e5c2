"""Imported first, this process is one in which Unsloth is not installed.

python -c "import without_unsloth; ..."
"""

import sys
from importlib.machinery import PathFinder

ABSENT = {"unsloth", "unsloth_zoo"}


class WithoutUnsloth(PathFinder):
    """Finds what is installed, but for these packages."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.split(".")[0] in ABSENT:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path = [WithoutUnsloth if finder is PathFinder else finder for finder in sys.meta_path]
