"""How long drawing will take, from a probe that goes on to the completions' own ends."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.prompts import turns_of
from sage_unsloth.sampling.engines import Completion, Engine, SamplingConfig
from sage_unsloth.sampling.record_sets import prompt_ids, sample_seed

PROBE_TOKENS = 256  # at most, of each completion of the probe
PROBE_SHARE = 8  # the probe is at most this part of what is missing


def estimate(
    engine: Engine,
    benchmark: Benchmark,
    config: SamplingConfig,
    missing: int,
    first: int | None = None,
) -> str:
    """How long it will take to draw `missing` completions, as a text.

    Args:
        engine: of the first model.
        benchmark: whose problems are the probe, evenly over them.
        config: sampling.
        missing: completions of all models and benchmarks.
        first: how many of them are drawn when every model has a sample of every problem, so that
            `compare --partial` has something to report; None for all.
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
    each = seconds * stretch(drawn, config, engine.fills_places) / count / 60
    tokens = sum(item.num_tokens for item in drawn)
    cut = sum(item.finish_reason == "length" for item in drawn)
    longer = ""
    if cut and limit < config.max_completion_length:
        longer = f", {cut} of them not at an end, which are taken to need all the tokens allowed"
    early = ""
    if first is not None and first < missing:
        early = f" A first report (compare --partial) is possible after {_text(each * first)} min."
    return (
        f"Estimate: {_text(each * missing)} min for drawing {missing:,} completions "
        f"({tokens / seconds:,.0f} tokens/s in a probe of {count}, {tokens / count:.0f} "
        f"tokens each{longer}). The bar is more precise after the first batches. Stop it "
        "whenever you like: the same command resumes." + early
    )


def _text(minutes: float) -> str:
    return f"{minutes:.{0 if minutes > 10 else 1}f}"


def before_first_report(
    missing: Mapping[tuple[int, str], int], benchmarks: Sequence[Benchmark], config: SamplingConfig
) -> int:
    """Completions to draw until every model has a sample of every problem.

    Models and benchmarks are drawn one after the other, each with one sample of all problems first.

    Args:
        missing: (model's number, benchmark's name) -> completions to draw, in the order of drawing.
        benchmarks: all that are drawn.
        config: sampling.
    """
    rows = {benchmark.name: len(benchmark.rows) for benchmark in benchmarks}
    lacking = [
        key for key, count in missing.items() if count > rows[key[1]] * (config.num_samples - 1)
    ]
    total = 0
    if lacking:
        last = max(lacking, key=list(missing).index)
        for key, count in missing.items():
            if key == last:
                return total + count - rows[key[1]] * (config.num_samples - 1)
            total += count
    return total


def stretch(drawn: Sequence[Completion], config: SamplingConfig, fills_places: bool) -> float:
    """How much longer the probe would have taken without its own limit of tokens.

    A completion that was cut counts as one of `max_completion_length`. A batch lasts as long as its
    longest completion, unless the engine fills the place of one that ends.
    """
    of_probe = [item.num_tokens + 1 for item in drawn]
    whole = [
        config.max_completion_length + 1 if item.finish_reason == "length" else item.num_tokens + 1
        for item in drawn
    ]
    longest = max(whole) / max(of_probe)
    return sum(whole) / sum(of_probe) if fills_places else longest
