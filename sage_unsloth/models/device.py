"""Whether there is a GPU, which GPUs are supported, and freeing its memory."""

import functools
import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sage_unsloth.runs.stopping import Terminated

OLDEST_CAPABILITY = (7, 0)
"""The oldest compute capability that Unsloth runs on."""
BFLOAT16_CAPABILITY = (8, 0)
"""The oldest one that computes in bfloat16; older GPUs train in float16."""

_TORCH = """
import json, torch
print("ARCHES " + json.dumps(torch._C._cuda_getArchFlags() if torch.version.cuda else None))
"""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU: its name and compute capability."""

    name: str
    capability: tuple[int, int]


def frees_models(function: Callable) -> Callable:
    """Decorates a function that loads models, so that an interrupt frees them.

    A notebook keeps the traceback with the variables of every frame: these are cleared.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, Terminated) as error:
            # The errors that were being handled when the interrupt came have frames of their own.
            link: BaseException | None = error
            while link is not None:
                traceback.clear_frames(link.__traceback__)
                link = link.__context__
            release_memory()
            raise

    return call


def release_memory() -> None:
    """Frees the memory of unreferenced models."""
    gc.collect()  # a model refers to itself in cycles, which only the collector breaks
    if has_gpu():
        import torch

        torch.cuda.empty_cache()


def has_gpu() -> bool:
    """Whether training and sampling run on a CUDA device."""
    import torch

    return torch.cuda.is_available()


def process_device() -> str:
    """The device of this process: its own GPU under torchrun or accelerate."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if has_gpu() else "cpu"


def sixteen_bit_dtype() -> str:
    """The 16-bit dtype of the GPU: "float16" before capability 8.0, which emulates bfloat16."""
    import torch

    return "bfloat16" if torch.cuda.get_device_capability() >= BFLOAT16_CAPABILITY else "float16"


def why_gpu_unsupported(capability: tuple[int, int], arches: Iterable[str]) -> str | None:
    """Why a GPU cannot be used; None if it can.

    Args:
        arches: of the installed PyTorch; empty if unknown.
    """
    arches = tuple(arches)
    if capability < OLDEST_CAPABILITY:
        return (
            f"Unsloth needs compute capability {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or "
            f"newer, but this GPU has {capability[0]}.{capability[1]}"
        )
    if arches and not drives(arches, capability):
        return (
            f"the installed PyTorch is compiled for {' '.join(arches)}, but this GPU has compute "
            f"capability {capability[0]}.{capability[1]}. Use another GPU, or an older PyTorch "
            "that is still in the range of this package"
        )
    return None


def drives(arches: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether a PyTorch that is compiled for `arches` runs on a GPU.

    Machine code ("sm_80") runs on GPUs of its major version from its minor one on; "compute_80" is
    compiled for any newer GPU on loading.
    """
    for arch in arches:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")  # of that card, or its family, alone
        built = int(digits[:-1]), int(digits[-1])
        newer = built <= capability
        if newer and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def nvidia_cards() -> tuple[tuple[Card, ...], int | None]:
    """The GPUs that nvidia-smi lists, and the driver's major version."""
    query = ["--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, check=True
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return (), None
    return parse_cards(said)


def parse_cards(said: str) -> tuple[tuple[Card, ...], int | None]:
    """GPUs and the driver's major version from lines such as "Tesla T4, 7.5, 550.54.15"."""
    cards, driver = [], None
    for line in said.splitlines():
        name, capability, version = (part.strip() for part in line.split(","))
        major, minor = capability.split(".")
        cards.append(Card(name=name, capability=(int(major), int(minor))))
        driver = int(version.split(".")[0])
    return tuple(cards), driver


def compiled_architecture() -> tuple[str, ...]:
    """What the installed PyTorch is compiled for, such as "sm_80"; empty without CUDA.

    Runs in a separate process, so that this one does not load PyTorch.
    """
    command = [sys.executable, "-c", _TORCH]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    line = next((x for x in said.splitlines() if x.startswith("ARCHES ")), "ARCHES null")
    return tuple((json.loads(line.removeprefix("ARCHES ")) or "").split())
