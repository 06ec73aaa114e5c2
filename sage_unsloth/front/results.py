"""Compares models, asks one a question, and exports a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Report(dict):
    """A report on models and benchmarks, which prints as tables."""

    def __str__(self) -> str:
        from sage_unsloth.evaluation.report_text import report_text

        return report_text(self)


def evaluate(
    models: Sequence[str],
    benchmarks: Sequence[str],
    folder: str | Path,
    *,
    problems: int | None = None,
    against: str | None = None,
    engine: str = "auto",
    training: Sequence[dict] = (),
    **sampling: Any,
) -> Report:
    """pass@k of models on benchmarks, with intervals and paired differences.

    Existing samples are not sampled again.

    Args:
        models: "NAME=MODEL" or "NAME=MODEL+ADAPTER"; a model is a run, a folder, a preset or a
            hub id.
        benchmarks: names for `load_benchmark`, or "NAME=FILE".
        folder: for samples, tables and figures.
        problems: how many problems of each benchmark to use; None uses all.
        against: the model that the others are compared with; None is the first.
        engine: "auto", "transformers" or "vllm".
        training: training rows; benchmark problems that overlap with them are reported.
        sampling: fields of `SamplingConfig`, such as `num_samples=64`; the defaults are the
            paper's.
    """
    from sage_unsloth.evaluation import evaluator
    from sage_unsloth.evaluation.named_models import parse_model
    from sage_unsloth.sampling.engines import SamplingConfig

    specs = [parse_model(text) for text in models]
    in_4bit = any(spec.load_in_4bit for spec in specs)
    return Report(
        evaluator.evaluate_models(
            specs,
            [evaluator.parse_benchmark(text, problems=problems) for text in benchmarks],
            folder,
            SamplingConfig(**sampling),
            engine=evaluator.choose_engine(engine, load_in_4bit=in_4bit),
            training=training,
            against=against,
            show=print,
        )
    )


def compare(
    sets: Sequence[str | Path], folder: str | Path, *, against: str | None = None
) -> Report:
    """The report of `evaluate` for existing samples, also from other runs or machines.

    Args:
        sets: record sets (.jsonl files), or folders that contain some.
        folder: for tables and figures.
        against: see `evaluate`.
    """
    from sage_unsloth.evaluation import report

    return Report(report.compare_sets([str(path) for path in sets], folder, against))


def ask(
    model: str | Path,
    question: str,
    *,
    n: int = 1,
    temperature: float | None = None,
    max_tokens: int = 512,
    seed: int = 3407,
) -> list[str]:
    """`n` answers of a model to a question, in the prompt format of its training.

    Args:
        model: a run, a folder, a preset or a hub id, or "MODEL+ADAPTER".
        n: number of answers; more than one needs a temperature.
        temperature: None answers greedily.
        seed: seed of the first answer.

    Raises:
        ValueError: several greedy answers, or an unknown model.
    """
    from sage_unsloth.evaluation import ask as asking
    from sage_unsloth.evaluation.named_models import parse_model

    config = asking.sampling_config(n, temperature, max_tokens)
    spec = parse_model(f"model={model}")
    with asking.open_model(spec, asking.LONGEST_PROMPT + max_tokens) as (engine, _):
        return [
            completion.text for completion in asking.sample_answers(engine, question, config, seed)
        ]


def save(run: str | Path, to: str, out: str | Path, **options: Any) -> Path:
    """Exports the result of a run with a model card, and checks the export.

    Args:
        run: folder of an SFT or RL run.
        to: "adapter", "merged" or "gguf".
        options: arguments of `export.export`, such as `quantization="q8_0"`.

    Raises:
        ValueError: `out` exists, the run is not complete, or a check failed.
    """
    from sage_unsloth.export import export
    from sage_unsloth.models.trained import read_run

    return export(read_run(run), to, out, **options)
