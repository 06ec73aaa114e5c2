"""The command `ask`: one question to a model or a run, in its own prompt format."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sage_unsloth.problems.options import add_prompt, prompt_of
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.sampling.engine_errors import engine_errors
from sage_unsloth.sampling.engines import Completion, SamplingConfig, TransformersEngine

if TYPE_CHECKING:
    from sage_unsloth.evaluation.loading import ModelSpec

DEFAULT_SEED = SamplingConfig.seed
LONGEST_PROMPT = 2048  # tokens of a question that there is room for


@contextmanager
def open_model(
    spec: "ModelSpec", max_length: int = 2048
) -> Iterator[tuple[TransformersEngine, PromptFormat]]:
    """A model that is loaded once and asked repeatedly, and its prompt format.

    Args:
        max_length: prompt and answer together, in tokens.

    Raises:
        EngineError: it could not be loaded.
    """
    from sage_unsloth.evaluation.loading import dtype_of
    from sage_unsloth.models.device import release_memory
    from sage_unsloth.models.embedded import is_small, settle_process
    from sage_unsloth.models.templates import choose_format
    from sage_unsloth.trainers.backends import load_backend

    load_backend()  # before transformers
    if is_small(spec.path):
        settle_process()
    from sage_unsloth.models.loading import load_policy

    prompt = choose_format(spec.path, spec.prompt, spec.adapter)
    with engine_errors(spec.name, "start"):
        model, tokenizer = load_policy(
            spec.path,
            adapter=spec.adapter,
            max_length=max_length,
            load_in_4bit=spec.load_in_4bit,
            dtype=dtype_of(spec, "auto"),
            template=spec.template,
            prompt=prompt,
        )
        engine = TransformersEngine(model, tokenizer)
    try:
        yield engine, prompt
    finally:
        del model, engine
        release_memory()


def sample_answers(
    engine: TransformersEngine, question: str, config: SamplingConfig, seed: int = DEFAULT_SEED
) -> list[Completion]:
    """`config.num_samples` completions of one question, each with its own seed.

    Args:
        config: sampling; `top_k=1` is greedy.
        seed: of the first completion; the others count up from it.
    """
    from sage_unsloth.sampling.record_sets import prompt_ids

    ids = prompt_ids(engine.tokenizer, question)
    seeds = range(seed, seed + config.num_samples)
    return engine.draw([ids] * config.num_samples, list(seeds), config)


def sampling_of(n: int, temperature: float | None, max_tokens: int) -> SamplingConfig:
    """Sampling settings for answers, greedy without a temperature; ValueError for several greedy
    ones.
    """
    if temperature is None and n > 1:
        raise ValueError(
            f"greedy answers are all the same, got n={n}. Add a temperature (--temperature 1)"
        )
    return SamplingConfig(
        num_samples=n,
        temperature=1.0 if temperature is None else temperature,
        top_k=1 if temperature is None else -1,
        min_p=0.0,
        max_completion_length=max_tokens,
    )


def add_ask(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "ask", help="ask a run or a model one question, or several from the keyboard"
    )
    parser.add_argument(
        "question", nargs="*", help="without it, questions are read from standard input, one a line"
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL[+ADAPTER]",
        help="folder of a run, a model or an adapter, a preset, or a hub id",
    )
    add_prompt(parser)
    parser.add_argument("--n", type=int, default=1, help="answers (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, help="sample at this temperature (default: greedy)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=SamplingConfig.max_completion_length,
        help="longest answer (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="(default: %(default)s)")
    parser.set_defaults(act=_ask)


def _ask(options: argparse.Namespace) -> int:
    from sage_unsloth.evaluation.named_models import parse_model

    config = sampling_of(options.n, options.temperature, options.max_tokens)
    spec = parse_model(f"model={options.model}", options.template, prompt_of(options))
    with open_model(spec, LONGEST_PROMPT + options.max_tokens) as (engine, prompt):
        for question in _questions(options.question):
            started = time.perf_counter()
            completions = sample_answers(engine, question, config, options.seed)
            _show(completions, prompt, time.perf_counter() - started)
    return 0


def _questions(words: Sequence[str]) -> Iterator[str]:
    """The question on the command line, or one per line of standard input."""
    if words:
        yield " ".join(words)
        return
    typed = sys.stdin.isatty()
    while True:
        if typed:
            print("\nQuestion (empty line or Ctrl-D ends): ", end="", flush=True)
        line = sys.stdin.readline()
        if not line.strip() and (typed or not line):
            return
        if line.strip():
            yield line.strip()


def _show(completions: Sequence[Completion], prompt: PromptFormat, seconds: float) -> None:
    from sage_unsloth.grading.extraction import extract_answer

    for number, completion in enumerate(completions, 1):
        if len(completions) > 1:
            print(f"--- {number}")
        print(completion.text)
        answer = extract_answer(completion.text, prompt=prompt)
        print(f"answer: {answer if answer is not None else 'none in the trained format'}")
        if completion.finish_reason == "length":
            print(f"truncated after {completion.num_tokens} tokens: raise --max-tokens")
    tokens = sum(completion.num_tokens for completion in completions)
    print(f"({tokens} tokens, {seconds:.1f} s)")
