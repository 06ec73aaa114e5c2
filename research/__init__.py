"""What measures and explains the package: run from a clone by `python -m research.NAME`, and never
installed.
"""
