"""What measures this package itself; not for use from outside."""

__all__ = []
