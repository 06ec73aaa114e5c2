"""What a guide costs in time and memory."""

__all__ = []
