"""An engine without a model, and the problems and settings of the tests that draw with it."""

import functools
from collections import Counter

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.problems import arithmetic
from sage_unsloth.sampling.engines import (
    Completion,
    InBatches,
    SamplingConfig,
    TransformersEngine,
)

CONFIG = SamplingConfig(
    num_samples=6, temperature=1.0, min_p=0.0, max_completion_length=48, batch_size=8
)
ROWS = arithmetic.problems("test")[:4]
BASE = data_folder() / BASE_MODEL


@functools.cache
def base_engine():
    """The tiny base model, loaded once for all tests; `load_unsloth` must have been called."""
    return TransformersEngine(*load_policy(BASE))


class Table(InBatches):
    """An engine that looks its completions up: what is drawn is a function of prompt and seed, and
    the file is what is tested.
    """

    name = "table"

    def __init__(self, fail_at=None, text="<SOLUTION>{}</SOLUTION>"):
        self.tokenizer = load_tokenizer(BASE)
        self.fail_at, self.text, self.drawn = fail_at, text, Counter()

    def draw(self, prompts, seeds, config):
        if self.fail_at is not None and self.drawn.total() >= self.fail_at:
            raise MemoryError("out of GPU memory")
        self.drawn.update(seeds)
        return [Completion(self.text.format(seed % 10), 7, "stop") for seed in seeds]
