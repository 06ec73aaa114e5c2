"""The order of sampling, and how completions are taken from an engine until a stop.

All problems get one sample first, then two, four, eight and so on: after a kill there can be a
report on all problems with fewer samples (`compare --partial`).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sage_unsloth.runs.stopping import Stop
from sage_unsloth.sampling.engine_errors import EngineError
from sage_unsloth.sampling.engines import Completion, Engine, Request, SamplingConfig
from sage_unsloth.sampling.token_streams import sample_seed

Wanted = tuple[dict, int]
"""A problem's row and a sample number."""


class Drawn(NamedTuple):
    """A completion with its row and sample number."""

    row: dict
    sample: int
    seed: int
    completion: Completion


def in_rounds(rows: Sequence[dict], num_samples: int) -> list[Wanted]:
    """Every (row, sample): all rows with sample 0, then with 1, with 2 and 3, with 4 to 7, ...

    In a round, samples of one problem are adjacent, so that its prompt is computed once for them.
    """
    bounds = [0, 1]
    while bounds[-1] < num_samples:
        bounds.append(2 * bounds[-1])
    return [
        (row, sample)
        for low, high in pairwise(bounds)
        for row in rows
        for sample in range(low, min(high, num_samples))
    ]


def completions(
    engine: Engine,
    config: SamplingConfig,
    missing: Sequence[Wanted],
    prompts: Mapping[str, Sequence[int]],
    stop: Stop,
    bar: Any,
    path: Path,
) -> Iterator[list[Drawn]]:
    """The completions of `missing`, in batches that are written together.

    Args:
        prompts: problem -> token ids.
        stop: on a signal, the batch in flight is finished, and nothing more.
        bar: advanced as completions end.
        path: of the record set, for the message.

    Raises:
        EngineError: the engine failed; completions that had ended were yielded.
    """
    requested: list[Wanted] = []

    def requests() -> Iterator[Request]:
        for row, sample in missing:
            if stop.cause is not None:
                return
            requested.append((row, sample))
            yield prompts[row["id"]], sample_seed(config.seed, row["id"], sample)

    ended: list[Drawn] = []
    count = 0
    failure: Exception | None = None
    tokens, started = 0, time.perf_counter()
    try:
        for number, completion in engine.stream(requests(), config, bar.update):
            row, sample = requested[number]
            seed = sample_seed(config.seed, row["id"], sample)
            ended.append(Drawn(row, sample, seed, completion))
            count += 1
            tokens += completion.num_tokens
            if len(ended) == config.batch_size:
                pace = tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{pace:.0f} tokens/s", refresh=False)
                yield ended
                ended = []
    except Exception as error:  # engines fail by classes of their own: out of memory, dead
        failure = error
    if ended:
        yield ended
    if failure is not None:
        raise EngineError(
            f"the engine failed with {len(missing) - count:,} completions left: "
            f"{type(failure).__name__}: {failure!s:.500}. Earlier completions are saved in {path}. "
            "Run the same command again, with a smaller batch if memory ran out"
        ) from failure
