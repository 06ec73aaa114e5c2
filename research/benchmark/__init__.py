"""The committed benchmark: every algorithm over training seeds, and the paper's claims."""

__all__ = []
