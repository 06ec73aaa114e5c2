"""How far number formats move a model: KL between models that differ in it, on the CPU.

    python -m sage_unsloth.lab.precision

The embedded model is fine-tuned in 4 bits by its own settings (40 steps of 16 rows, a minute). Then
each pair of models below reads the prompts and worked solutions of 128 rows that it was not trained
on, and KL(first ‖ second) is averaged over their tokens. What training changed is the yardstick.
"""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.merging import save_merged
from sage_unsloth.models.quantised import MERGED
from sage_unsloth.problems import arithmetic
from sage_unsloth.prompts import PROJECT_PROMPT
from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.runs.record import environment
from sage_unsloth.sampling.record_sets import prompt_ids
from sage_unsloth.training import embedded_settings
from sage_unsloth.training.sft_stage import sft

ROWS = 128
"""Rows that are read, and kept from training."""
RUN = "sft"


def texts(tokenizer: Any, rows: list[dict]) -> list[tuple[int, list[int]]]:
    """Of each row the length of its prompt, and the ids of prompt and worked solution."""
    found = []
    for row in rows:
        prompt = prompt_ids(tokenizer, row["problem"])
        taught = tokenizer(PROJECT_PROMPT.taught(row), add_special_tokens=False)["input_ids"]
        found.append((len(prompt), [*prompt, *taught]))
    return found


def log_probs(model: Any, found: list[tuple[int, list[int]]]) -> list[Any]:
    """Of each text (T, V) float64: the next token's log-probabilities before each solution token,
    the last one included.
    """
    import torch

    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
            for start, ids in found
        ]


def mean_kl(first: list[Any], second: list[Any]) -> float:
    """KL(first ‖ second), nats a token, over all texts' tokens."""
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(first, second, strict=True))
    return total / sum(len(p) for p in first)


def measure(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The table: a row for each pair of models.

    Args:
        folder: gets the run, which resumes; another one is refused.
        changes: fields of `SftConfig` in place of the embedded model's.
    """
    rows = arithmetic.problems("sft")
    training, kept = rows[:-ROWS], rows[-ROWS:]
    base = data_folder() / BASE_MODEL
    config = replace(embedded_settings.SFT, load_in_4bit=True, **changes)
    merged = sft(config, base, training, folder / RUN)
    adapter = folder / RUN / "adapter"
    policy, tokenizer = load_policy(base, adapter=adapter, load_in_4bit=True)
    found = texts(tokenizer, kept)
    trained = log_probs(policy, found)
    with policy.disable_adapter():
        below = log_probs(policy, found)
    exact = {dtype: folder / f"exact-{dtype}" for dtype in ("float32", "bfloat16")}
    for dtype, path in exact.items():
        if not path.exists():
            model, _ = load_policy(base, adapter=adapter, load_in_4bit=True)
            save_merged(model, tokenizer, path, dtype=dtype)
    unmarked = folder / "unmarked"  # as another tool would have merged it
    if not unmarked.exists():
        shutil.copytree(exact["float32"], unmarked)
        config_file = unmarked / "config.json"
        write_json(config_file, {k: v for k, v in read_json(config_file).items() if k != MERGED})

    def of(path: Path, **settings: Any) -> list[Any]:
        return log_probs(load_policy(path, **settings)[0], found)

    plain, again = of(base), of(unmarked, load_in_4bit=True)
    pairs = {
        "the model before and after its weights are quantised": (plain, below),
        "the model in float32 and in bfloat16": (plain, of(base, dtype="bfloat16")),
        "the model in float32 and in float16": (plain, of(base, dtype="float16")),
        "P, the policy trained in 4 bits, and the 4-bit model it began with": (trained, below),
        "P and its exact merge, float32": (trained, of(exact["float32"])),
        "P and its exact merge, bfloat16 (an export)": (trained, of(exact["bfloat16"])),
        "P and that exact merge, quantised again": (trained, again),
        "that exact merge, quantised again, and the 4-bit model it began with": (again, below),
        "P and SFT's merged model (into the model before it was quantised)": (trained, of(merged)),
        "P and SFT's merged model, quantised (RL in 4 bits begins with it)": (
            trained,
            of(merged, load_in_4bit=True),
        ),
    }
    return [
        {"models": name, "kl": mean_kl(first, second)} for name, (first, second) in pairs.items()
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/precision"),
        help="folder for precision.json and the run (default: %(default)s)",
    )
    options = parser.parse_args()
    rows = measure(options.out)
    write_json(
        options.out / "precision.json",
        {"rows_read": ROWS, "pairs": rows, "environment": environment()},
    )
    print(json.dumps(rows, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
