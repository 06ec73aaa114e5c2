"""The committed frontiers: pass@1 against pass@k, methods at several strengths over seeds."""

__all__: list[str] = []
