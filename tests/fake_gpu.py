"""A GPU for tests on a machine without one: values from the CPU, devices judged by PyTorch.

While `FakeGpu` is open, `device="cuda"` and `.to("cuda")` work. Tensors stay on the CPU, so that
values, data-dependent branches and the backward pass are real; which of them are "on the GPU" is
kept by their storage. An operation on tensors of both devices, in the backward pass too, is also
run on tensors of PyTorch's FakeTensorMode that have the same shapes and the pretended devices: a
mix that a GPU would refuse raises there, and the result's device is what FakeTensorMode says.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)
INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
NAMES = "stack cat gather scatter scatter_ mm bmm addmm embedding index_select"
NO_NUMBERS = {getattr(torch.ops.aten, name) for name in NAMES.split()}
"""Operations that take no number of the CPU beside a tensor on the GPU."""
NEEDS_CPU = {torch.Tensor.numpy, torch.Tensor.__array__}


class DeviceMismatch(RuntimeError):
    """What FakeTensorMode does not judge."""


class GeneratorMismatch(RuntimeError):
    """As PyTorch says it of a CPU's generator for a tensor on the GPU."""


MISMATCH = (DeviceMismatch, FakeTensorDeviceMismatchError, GeneratorMismatch, TypeError)


class FakeGpu:
    """A context in which "cuda" is a device; `on_gpu` says what is on it."""

    def __enter__(self) -> "FakeGpu":
        self.storages: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address taken
        self.target: torch.device | None = None
        self.operations = 0  # with a tensor on the GPU
        self._rules = FakeTensorMode(allow_non_fake_inputs=False)
        with ExitStack() as stack:
            stack.enter_context(_Operations(self))
            stack.enter_context(_Functions(self))
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return CUDA if _storage(tensor)._cdata in self.storages else CPU

    def put(self, tensor: torch.Tensor, device: torch.device) -> None:
        storage = _storage(tensor)
        if device.type == "cuda":
            self.storages[storage._cdata] = StorageWeakRef(storage)
        else:
            self.storages.pop(storage._cdata, None)


class _Functions(TorchFunctionMode):
    """What is asked in Python: devices of tensors, and tensors on a device."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        gpu, first = self.gpu, args[0] if args else None
        if isinstance(first, torch.Tensor):
            here = gpu.device_of(first)
            if func == torch.Tensor.device.__get__:  # another object each time
                return here
            if func == torch.Tensor.is_cuda.__get__:
                return here.type == "cuda"
            if func is torch.Tensor.get_device:
                return 0 if here.type == "cuda" else -1
            if func in NEEDS_CPU and here.type == "cuda":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            if func is torch.Tensor.cpu:
                return self._moved(first, CPU)
            if func is torch.Tensor.cuda:
                return self._moved(first, CUDA)
            if func in (torch.Tensor.to, torch.Tensor.type_as):
                return self._to(func, args, kwargs)
        device = _device(kwargs.get("device"))
        if device is None:
            return func(*args, **kwargs)
        before, gpu.target = gpu.target, device
        try:
            result = func(*args, **kwargs | {"device": CPU})
        finally:
            gpu.target = before
        if isinstance(result, torch.Tensor) and gpu.device_of(result) != device:
            gpu.put(result, device)
        return result

    def _to(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        """`x.to(device)`, `x.to(device, dtype)`, `x.to(other)`, by words too."""
        tensor, *rest = args
        device = _device(kwargs.pop("device", None))
        other = kwargs.pop("other", None)
        for place, value in enumerate(rest):
            if isinstance(value, torch.Tensor):
                device, rest[place] = self.gpu.device_of(value), value.dtype
            elif place == 0 and (value is None or _device(value) is not None):
                device, rest[0] = _device(value), tensor.dtype
        if len(rest) > 1 and not isinstance(rest[1], bool):  # device and dtype by position
            rest[:2] = [rest[1] or tensor.dtype]
        if other is not None:
            device, rest = self.gpu.device_of(other), [other.dtype, *rest]
        result = torch.Tensor.to(tensor, *rest, **kwargs) if rest or kwargs else tensor
        return result if device is None else self._moved(result, device)

    def _moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.gpu.device_of(tensor) == device:
            return tensor
        return _Move.apply(tensor, self.gpu, device)


class _Move(torch.autograd.Function):
    """A copy on another device; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gpu: FakeGpu, device: torch.device) -> torch.Tensor:
        ctx.gpu, ctx.source = gpu, gpu.device_of(tensor)
        result = tensor.detach().clone()
        gpu.put(result, device)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        result = gradient.clone()
        ctx.gpu.put(result, ctx.source)
        return result, None, None


class _Operations(TorchDispatchMode):
    """What is computed: each operation's devices are those that FakeTensorMode allows."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        gpu = self.gpu
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_gpu = [t for t in tensors if gpu.device_of(t).type == "cuda"]
        result = func(*args, **kwargs)
        if tensors:
            device = CPU
            if on_gpu:
                gpu.operations += 1
                device = self._judged(func, args, kwargs, tensors)
        else:
            device = gpu.target or CPU
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != device.type:
            raise GeneratorMismatch(
                f"Expected a '{device.type}' device type for generator but found "
                f"'{generator.device.type}'"
            )
        known, given = {id(t) for t in tensors}, {_storage(t)._cdata for t in tensors}
        for tensor in tree_leaves(result):
            # A view has the storage, and so the device, of what it is a view of.
            new = isinstance(tensor, torch.Tensor) and id(tensor) not in known
            if new and _storage(tensor)._cdata not in given:
                gpu.put(tensor, device)
        return result

    def _judged(self, func: Any, args: Any, kwargs: dict, tensors: list) -> torch.device:
        """The device of the result; raises on a mix."""
        devices = {self.gpu.device_of(t) for t in tensors}
        if devices == {CUDA}:
            return CUDA
        if func in INDEXED and self.gpu.device_of(args[0]) == CPU:
            # FakeTensorMode lets this pass, a GPU does not.
            raise DeviceMismatch(f"indices must be on the device of what they index: {func}")
        if func.overloadpacket in NO_NUMBERS:
            raise DeviceMismatch(f"two devices in {func}")
        kwargs.pop("device", None)  # within an operation, where it is that of the inputs

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(
                tensor.size(),
                tensor.stride(),
                dtype=tensor.dtype,
                device=self.gpu.device_of(tensor),
            )

        with self.gpu._rules:
            try:
                given = tree_map_only(torch.Tensor, fake, (args, kwargs))
                result = func(*given[0], **{k: v for k, v in given[1].items() if k != "generator"})
            except DEPENDS_ON_DATA as error:
                if func not in INDEXED:
                    raise DeviceMismatch(f"two devices in {func}") from error
                return CUDA
            found = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            return found[0].device if found else CUDA


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # within torch.func
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return CUDA if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
        return _device(torch.device(value))
    return None


def pretend_gpu_of(trainer: Any, monkeypatch: Any) -> None:
    """The trainer's model is on the GPU, and accelerate and transformers say so too."""
    for of in (trainer.accelerator, trainer.args):
        monkeypatch.setattr(type(of), "device", property(lambda self: CUDA), raising=False)
    trainer.model.to("cuda")
