"""pass@1 against pass@n: methods at several strengths over training seeds."""

__all__: list[str] = []
