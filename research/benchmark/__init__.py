"""Every algorithm over training seeds, and a verdict on each claim of the paper."""

__all__ = []
