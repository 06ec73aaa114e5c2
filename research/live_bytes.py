"""Bytes of tensors that are alive, counted operation by operation, on fake tensors too.

A storage is counted from the operation that makes it until nothing refers to it any more, and
rounded up to the 512 bytes that PyTorch's allocator gives on a GPU. What a kernel takes for itself
while it runs is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512


class LiveBytes(TorchDispatchMode):
    """While open, counts what operations allocate.

    Attributes:
        now: bytes that are alive.
        peak: the most that were alive at once, since the beginning or `restart`.
        at_peak: bytes by the operation that made them, at that moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._alive: Counter[str] = Counter()
        self._known: weakref.WeakSet = weakref.WeakSet()
        self._on_host = False

    def restart(self) -> None:
        """The peak is looked for anew."""
        self.peak, self.at_peak = self.now, Counter(self._alive)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What is allocated within is in the computer's memory, and not counted."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor, str(func.overloadpacket))
        return result

    def _add(self, tensor: Tensor, made_by: str) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        if self._on_host:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self.now += size
        self._alive[made_by] += size
        weakref.finalize(storage, self._remove, size, made_by)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, Counter(self._alive)

    def _remove(self, size: int, made_by: str) -> None:
        self.now -= size
        self._alive[made_by] -= size
