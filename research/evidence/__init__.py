"""The committed benchmark and frontiers, reported by the statistics of a study."""

__all__: list[str] = []
