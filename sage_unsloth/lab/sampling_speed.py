"""Measures drawing on a CPU: filled places beside batches of `generate`, on the tiny model.

    python -m sage_unsloth.lab.sampling_speed --out data/results/sampling

Both draw the same completions, each by its own seed, in one run on one thread, timed in seconds of
CPU: `refilling`, and one call of `generate` for each batch, in turn, `REPEATS` times; seconds are
medians, ratios are taken pair by pair. A high temperature makes the mix of
lengths that a reasoning model has, most of them short beside the longest; at temperature 1 the tiny
model's completions are about equally long, which is the worst case. `generate` with its own
sampling shows what a random stream for each row costs. How often the batch changes a completion is
counted too.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.record import environment
from sage_unsloth.sampling.engines import Completion, SamplingConfig, TransformersEngine

PROBLEMS, SAMPLES, BATCH, REPEATS = 16, 16, 32, 5
MIXES = {"long and short": (2.5, 256), "about equally long": (1.0, 48)}
"""Name -> temperature, longest completion in tokens."""


def load_engine() -> TransformersEngine:
    """The tiny base model on one thread."""
    import torch

    from sage_unsloth.models.embedded import BASE_MODEL, data_folder
    from sage_unsloth.models.loading import load_policy

    torch.set_num_threads(1)
    return TransformersEngine(*load_policy(data_folder() / BASE_MODEL))


def requests(engine: TransformersEngine) -> list[tuple[list[int], int]]:
    """Prompts and seeds, ordered by problem."""
    from sage_unsloth.problems import arithmetic
    from sage_unsloth.sampling.record_sets import prompt_ids, sample_seed

    return [
        (prompt_ids(engine.tokenizer, row["problem"]), sample_seed(0, row["id"], sample))
        for row in arithmetic.problems("test")[:PROBLEMS]
        for sample in range(SAMPLES)
    ]


def in_batches(
    engine: TransformersEngine, wanted: list, config: SamplingConfig
) -> list[Completion]:
    """By `generate`, batch after batch, each row by its own stream."""
    found = []
    for start in range(0, len(wanted), config.batch_size):
        prompts, seeds = zip(*wanted[start : start + config.batch_size], strict=True)
        found += engine._generate(prompts, seeds, config)
    return found


def own_sampling(engine: TransformersEngine, wanted: list, config: SamplingConfig) -> None:
    """By `generate` with its own sampling, which has one generator for all rows."""
    import torch

    tokenizer = engine.tokenizer
    for start in range(0, len(wanted), config.batch_size):
        prompts = [ids for ids, _ in wanted[start : start + config.batch_size]]
        inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        with torch.inference_mode():
            engine.model.generate(
                **inputs,
                do_sample=True,
                temperature=config.temperature,
                top_p=1.0,
                top_k=0,
                max_new_tokens=config.max_completion_length,
                suppress_tokens=[tokenizer.pad_token_id],
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and its value."""
    started = time.process_time()
    value = run()
    return time.process_time() - started, value


def ratios(one: list[float], other: list[float]) -> list[float]:
    """Least, median and largest ratio of the pairs."""
    found = [a / b for a, b in zip(one, other, strict=True)]
    return [round(value, 2) for value in (min(found), statistics.median(found), max(found))]


def measure(engine: TransformersEngine, mix: str) -> dict[str, Any]:
    """Both ways on one mix of lengths."""
    temperature, length = MIXES[mix]
    config = SamplingConfig(
        temperature=temperature, min_p=0.0, max_completion_length=length, batch_size=BATCH
    )
    wanted = requests(engine)
    short = replace(config, max_completion_length=2)
    list(engine.stream(wanted[:BATCH], short))  # warms up
    in_batches(engine, wanted[:BATCH], short)
    filled, batches, plain = [], [], []
    for _ in range(REPEATS):
        seconds, found = timed(lambda: dict(engine.stream(wanted, config)))
        filled.append(seconds)
        seconds, expected = timed(lambda: in_batches(engine, wanted, config))
        batches.append(seconds)
        seconds, _ = timed(lambda: own_sampling(engine, wanted, config))
        plain.append(seconds)
    order = random.Random(0).sample(range(len(wanted)), len(wanted))
    again = dict(engine.stream([wanted[i] for i in order], replace(config, batch_size=20)))
    lengths = [one.num_tokens for one in expected]
    return {
        "mix": mix,
        "completions": len(wanted),
        "tokens": {"mean": round(sum(lengths) / len(lengths), 1), "longest": max(lengths)},
        "filled_seconds": round(statistics.median(filled), 2),
        "batches_seconds": round(statistics.median(batches), 2),
        "own_sampling_seconds": round(statistics.median(plain), 2),
        "times_as_fast": ratios(batches, filled),
        "stream_ratio": ratios(batches, plain),
        "differ_from_batches": sum(found[i] != one for i, one in enumerate(expected)),
        "differ_in_other_order_and_size": sum(
            again[place] != found[i] for place, i in enumerate(order)
        ),
        "sampling": asdict(config),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/sampling"),
        help="folder for speed.json (default: %(default)s)",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    engine = load_engine()
    result = {"mixes": [measure(engine, mix) for mix in MIXES], "environment": environment()}
    write_json(options.out / "speed.json", result)
    print(json.dumps(result["mixes"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
