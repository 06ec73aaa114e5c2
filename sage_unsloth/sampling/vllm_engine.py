"""Samples completions with vLLM's offline engine, which batches continuously."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.dtypes import chosen_dtype
from sage_unsloth.sampling.engine_arguments import check_arguments, engine_arguments
from sage_unsloth.sampling.engine_errors import engine_errors
from sage_unsloth.sampling.engines import (
    Completion,
    Ended,
    InBatches,
    Request,
    SamplingConfig,
    ignore,
    make_completion,
)
from sage_unsloth.trainers.cpu_vllm import run_in_this_process


class VllmEngine(InBatches):
    """vLLM's offline engine: the base model loaded once, adapters changed by request.

    Args:
        path: model folder or hub id.
        adapters: every LoRA folder that `use` will get.
        max_length: prompt and completion together, tokens.
        dtype: of the weights, one of `dtypes.DTYPES`; "auto" is the model's own.
        arguments: further arguments of `vllm.LLM`, such as `gpu_memory_utilization`,
            `enforce_eager`.

    Raises:
        ValueError: an unknown dtype, or an argument that vLLM does not have.
        EngineError: it cannot be imported, or does not start.
    """

    name = "vllm"

    def __init__(
        self,
        path: str | Path,
        adapters: Sequence[str | Path] = (),
        max_length: int = 4096,
        *,
        dtype: str = "auto",
        arguments: Mapping[str, Any] | None = None,
    ):
        from sage_unsloth.models.tokenizers import load_stop_tokens, load_tokenizer

        dtype = chosen_dtype(dtype, path)
        if not has_gpu():
            run_in_this_process()
        with engine_errors(str(path), "import"):
            from vllm import LLM

            check_arguments(arguments or {})
        self.tokenizer = load_tokenizer(path)
        self.stops = load_stop_tokens(path, self.tokenizer)
        self.max_length: int | None = max_length
        self.arguments: Mapping[str, Any] = engine_arguments(adapters, max_length, dtype) | dict(
            arguments or {}
        )
        with engine_errors(str(path), "start", refusals=False):
            self.llm = LLM(model=str(path), **self.arguments)
        self.adapters = [str(adapter) for adapter in adapters]
        self.lora_request: Any = None

    @classmethod
    def from_llm(cls, llm: Any, tokenizer: Any, stops: Sequence[int]) -> "VllmEngine":
        """Wraps the engine of an RL model, without an adapter: the start of training."""
        engine = cls.__new__(cls)
        engine.llm, engine.tokenizer, engine.stops = llm, tokenizer, list(stops)
        engine.adapters, engine.lora_request = [], None
        engine.arguments, engine.max_length = {}, None
        return engine

    def use(self, adapter: str | Path | None) -> None:
        """Switches to this adapter, or to the base model for None."""
        self.lora_request = None if adapter is None else lora_request(self.adapters, adapter)

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        config: SamplingConfig,
        ended: Ended = ignore,
    ) -> list[Completion]:
        """One completion of each prompt, in order; see `Engine`.

        Raises:
            ValueError: prompt and longest completion exceed the engine's length, which would end
                completions early.
        """
        longest = max(map(len, prompts), default=0) + config.max_completion_length
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"prompt and completion must fit the engine's {self.max_length} tokens, got "
                f"{longest}, of which max_completion_length is {config.max_completion_length}. "
                "Start it with a larger max_length"
            )
        # Equal prompts are neighbours here, and vLLM's prefix cache computes them once.
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts],
            [request_parameters(self.tokenizer, self.stops, seed, config) for seed in seeds],
            lora_request=self.lora_request,
            use_tqdm=partial(reporting_bar, ended),
        )
        return [
            make_completion(self.tokenizer, output.outputs[0].token_ids, self.stops)
            for output in outputs
        ]

    def stream(
        self, requests: Iterable[Request], config: SamplingConfig, ended: Ended = ignore
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine`. A call of vLLM samples `batch_size` completions and calls `ended`
        meanwhile.
        """
        waiting, start = iter(requests), 0
        while batch := list(islice(waiting, config.batch_size)):
            prompts, seeds = zip(*batch, strict=True)
            yield from enumerate(self.draw(prompts, seeds, config, ended), start)
            start += len(batch)


def reporting_bar(ended: Ended, iterable: Iterable | None = None, **options: Any) -> Any:
    """A `use_tqdm` argument of `LLM.generate` that shows nothing and calls `ended`.

    vLLM makes one bar around the requests that it adds, and one that it advances by each that ends,
    whose `n`, `postfix` and elapsed time it reads.

    Args:
        ended: called with the number of completions.
        iterable: the requests, for the first bar.
    """
    if iterable is not None:
        return iterable
    from tqdm import tqdm

    class Reporting(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            ended(int(n or 0))
            return super().update(n)

    # A disabled one has no `n` and no elapsed time.
    return Reporting(**options | {"file": io.StringIO(), "mininterval": 3600, "leave": False})


def lora_request(adapters: Sequence[str], adapter: str | Path) -> Any:
    """vLLM's request for one of the adapters; ids start at 1, in the order of `adapters`."""
    from vllm.lora.request import LoRARequest

    number = adapters.index(str(adapter)) + 1
    return LoRARequest(f"adapter-{number}", number, str(adapter))


def request_parameters(
    tokenizer: Any, stops: Sequence[int], seed: int, config: SamplingConfig
) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        seed=seed,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.max_completion_length,
        stop_token_ids=list(stops),
        logit_bias={tokenizer.pad_token_id: -100.0},  # as the pad token is suppressed in training
        detokenize=False,  # texts are decoded as with transformers
    )
