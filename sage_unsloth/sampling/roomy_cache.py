"""A layer of transformers' cache with room for more columns, so that a step does not copy it all.

`DynamicLayer` joins each new column to the others, which copies every column in every step.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

SPARE = 32  # columns


class RoomyLayer(DynamicLayer):
    """Keys and values (rows, heads, columns, size), the beginning of two larger buffers."""

    buffers: tuple[Any, Any]

    @classmethod
    def of_shape(cls, like: "RoomyLayer", rows: int, columns: int) -> "RoomyLayer":
        """A layer of zeros, of the heads and sizes of another."""
        layer = cls()
        layer.lazy_initialization(*like.pair)
        layer.buffers = tuple(  # pyright: ignore[reportAttributeAccessIssue]
            part.new_zeros(rows, part.shape[1], columns + SPARE, part.shape[3])
            for part in like.pair
        )
        layer._show(columns)
        return layer

    @property
    def pair(self) -> tuple[Any, Any]:
        """Keys and values."""
        return self.keys, self.values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds columns behind the others, and returns all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self.buffers = self.pair
            return self.pair
        start = self.pair[0].shape[2]
        end = start + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            self.buffers = tuple(  # pyright: ignore[reportAttributeAccessIssue]
                torch.nn.functional.pad(part, (0, 0, 0, end - start + SPARE)) for part in self.pair
            )
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self._show(end)
        return self.pair

    def _show(self, columns: int) -> None:
        self.keys, self.values = (buffer[:, :, :columns] for buffer in self.buffers)
