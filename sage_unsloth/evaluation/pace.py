"""How long drawing will take, from a probe that goes on to the completions' own ends."""

import time
from collections.abc import Sequence
from dataclasses import replace

from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.prompts import turns_of
from sage_unsloth.sampling.engines import Completion, Engine, SamplingConfig
from sage_unsloth.sampling.record_sets import prompt_ids, sample_seed

PROBE_TOKENS = 256  # at most, of each completion of the probe
PROBE_SHARE = 8  # the probe is at most this part of what is missing


def estimate(engine: Engine, benchmark: Benchmark, config: SamplingConfig, missing: int) -> str:
    """How long it will take to draw `missing` completions, as a text.

    Args:
        engine: of the first model.
        benchmark: whose problems are the probe, evenly over them.
        config: sampling.
        missing: completions of all models and benchmarks.
    """
    count = min(config.batch_size, -(-missing // PROBE_SHARE))
    rows = [benchmark.rows[i * len(benchmark.rows) // count] for i in range(count)]
    seeds = [sample_seed(config.seed, row["id"], 0) for row in rows]
    prompts = [prompt_ids(engine.tokenizer, turns_of(row)) for row in rows]
    limit = min(PROBE_TOKENS, config.max_completion_length)
    # What is loaded and compiled with the first token of a process is no pace.
    engine.draw(prompts[:1], seeds[:1], replace(config, max_completion_length=1))
    started = time.perf_counter()
    drawn = engine.draw(prompts, seeds, replace(config, max_completion_length=limit))
    seconds = time.perf_counter() - started
    minutes = seconds * stretch(drawn, config, engine.name) * missing / count / 60
    tokens = sum(one.num_tokens for one in drawn)
    cut = sum(one.finish_reason == "length" for one in drawn)
    longer = ""
    if cut and limit < config.max_completion_length:
        longer = f", {cut} of them not at an end, which are taken to need all the tokens allowed"
    return (
        f"Estimate: {minutes:.{0 if minutes > 10 else 1}f} min for drawing {missing:,} completions "
        f"({tokens / seconds:,.0f} tokens/s in a probe of {count}, {tokens / count:.0f} tokens "
        f"each{longer}); the bar knows better after the first batches. Stop it whenever you like: "
        "the same command resumes."
    )


def stretch(drawn: Sequence[Completion], config: SamplingConfig, engine: str) -> float:
    """How much longer the probe would have taken without its own limit of tokens.

    A completion that was cut counts as one of `max_completion_length`. With transformers a batch
    lasts as long as its longest completion; vLLM fills the place of one that ends.
    """
    of_probe = [one.num_tokens + 1 for one in drawn]
    whole = [
        config.max_completion_length + 1 if one.finish_reason == "length" else one.num_tokens + 1
        for one in drawn
    ]
    longest = max(whole) / max(of_probe)
    return longest if engine == "transformers" else sum(whole) / sum(of_probe)
