"""Stage 1 as a user starts it: data, training, the model before and after, next command."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.models.device import frees_models, release_memory
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.templates import choose_format
from sage_unsloth.models.tokenizers import open_tokenizer
from sage_unsloth.planning.presets import model_preset
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.corpora import SFT_DATA, sft_corpus, sft_rows
from sage_unsloth.problems.gradable import gradable
from sage_unsloth.problems.held_out import hold_out
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.storage import check_room
from sage_unsloth.sampling.engines import SamplingConfig, TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training.ledger import Ledger
from sage_unsloth.training.outcomes import finished_text, training_command, verifier_options
from sage_unsloth.training.preflight import signal
from sage_unsloth.training.recipes import default_data, load_libraries, own_data, show, show_log
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_config import SftConfig
from sage_unsloth.training.sft_stage import SftJob, resolve_sft, run_sft_job
from sage_unsloth.training.stage import check_tracker, known_settings
from sage_unsloth.training.starting import (
    SMOKE,
    model_path,
    rlvr_config,
    sft_config,
    trained_preset,
)

SAMPLES_PER_ROW = 4  # completions of each held-out row, before and after SFT


@frees_models
def run_sft(
    out: str | Path,
    *,
    model: str | Path,
    data: str | None = None,
    path: str | Path | None = None,
    columns: Columns | None = None,
    limit: int | None = None,
    held_out: int = 32,
    smoke: bool = False,
    verifier: Checker | str | Callable[[str, str], Any] | None = None,
    allow_unconfined: bool = False,
    command: Sequence[str] = (),
    **settings: Any,
) -> list[dict]:
    """Stage 1: filter the rows, train, and compare the model before and after on held-out rows.

    Args:
        out: folder of the run; a second run in it resumes.
        model: a preset's name, a folder or a hub id.
        data, path, columns, limit: see `corpora.sft_rows`; the embedded model has its own data.
        held_out: rows for the comparison; 0 skips it.
        smoke: a run of seconds that only checks that everything works.
        verifier, allow_unconfined: as for `run_rlvr`; if its golds are not answers, such as tests
            of a program, solutions are trained on as they are.
        command: the words of the command, for `run.json`.
        settings: fields of `SftConfig`, which win over the preset.

    Returns:
        The comparison: shares of completions in format, parsed, correct and truncated, before and
            after.

    Raises:
        ValueError: see `sft` and `sft_corpus`.
    """
    show_log()
    changes = (SMOKE["sft"] if smoke else {}) | settings
    check_tracker(SftConfig(**changes).report_to)
    # The length and the data are those of the first model in a chain of runs.
    preset = trained_preset(model)
    start, ledger = model_path(model_preset(model)), Ledger(out, "sft")
    changes["prompt"] = choose_format(start, settings.get("prompt"))
    config = sft_config(preset, ledger.recorded_settings(), **changes)
    if (done := ledger.result()) is not None:
        show(finished_text(out, done))
    data = data or default_data(preset, path, "openmath")
    checker = None
    if verifier is not None:
        checker = get_verifier(verifier, allow_unconfined=allow_unconfined)
    result = sft_rows(
        data=data,
        path=path,
        limit=limit,
        columns=columns,
        prompt=config.prompt,
        verifier=checker,
    )
    ledger.compare(known_settings("sft", config, start))
    load_libraries(preset, config.optim)
    tokenizer, template = open_tokenizer(start, settings.get("template"), prompt=config.prompt)
    config = replace(config, template=template.template)
    corpus = sft_corpus(tokenizer, config.max_length, source=result, prompt=config.prompt)
    # Without answers there is nothing to compare.
    answered = all("answer" in row for row in corpus.rows)
    training, selected = hold_out(corpus.rows, min(held_out, len(corpus.rows) // 4) * answered)
    dropped = len(corpus.rows) - len(training) - len(selected)
    graded = gradable(selected, checker or MATH)
    ungraded = [row for row, good in zip(selected, graded, strict=True) if not good]
    selected = [row for row, good in zip(selected, graded, strict=True) if good]
    # Rows that cannot be graded are no use for the comparison, but can be trained on.
    training += ungraded
    steps = config.max_steps
    if steps == -1:
        # The trainer rounds a partial last step of an epoch up.
        steps = -(-len(training) // config.batch_size) * config.epochs
    show(f"SFT of {preset.name} -> {out}\n{template}\n{corpus.origin()}\n")
    show(corpus.table())
    for text in filter(None, (corpus.left_out_text(), corpus.duplicates_text())):
        show(text)
    show(
        f"\n{len(training):,} rows to train on, {len(selected)} held out, {dropped} left out "
        f"because they share a problem with these. {steps:,} steps of {config.batch_size}.\n"
        + ungraded_text(ungraded, checker or MATH)
    )
    # Room for the merged model; the size of a hub model is unknown here.
    if done is None:
        check_room(out, sum(file.stat().st_size for file in Path(start).glob("*.safetensors")))
    job = resolve_sft(
        config,
        start,
        training,
        out,
        data=corpus.record(path or data),
        command=command,
        tokenizer=tokenizer,
        judged=True,
    )
    merged = run_sft_job(job)
    rollouts = rlvr_config(preset)
    table = before_and_after(job, merged, selected, checker or MATH, rollouts) if selected else []
    if table:
        show(
            f"\n{len(selected)} held-out rows, {SAMPLES_PER_ROW} completions each, sampled as in "
            f"RL (temperature {rollouts.temperature:g}, min-p {rollouts.min_p:g}):\n"
        )
        show(table)
    if not smoke and (text := out_of_format(table)):
        show(f"\n{text}")
        return table
    own = own_data(data, path, columns, SFT_DATA)
    command = training_command(
        out,
        config,
        sft_config(preset).max_length,
        smoke=smoke,
        data=own,
        columns=columns,
        verifier=verifier_options(checker, allow_unconfined=allow_unconfined),
    )
    show(f"\nNext: {command}")
    return table


def before_and_after(
    job: SftJob, merged: Path, rows: Sequence[dict], checker: Checker, rollouts: RlvrConfig
) -> list[dict]:
    """Shares of completions in format, parsed, correct and truncated, before and after SFT.

    Saved in `before_after.json`. Sampled with the RL settings `rollouts`. After training in 4 bits
    the model is the adapter on the 4-bit weights, as trained.
    """
    config, start = job.config, job.model_path
    report = job.folder / "before_after.json"
    if report.exists():
        return json.loads(report.read_text(encoding="utf-8"))
    folder = job.folder / "held-out"
    folder.mkdir(exist_ok=True)
    sampling = SamplingConfig(
        num_samples=SAMPLES_PER_ROW,
        temperature=rollouts.temperature,
        top_p=rollouts.top_p,
        min_p=rollouts.min_p,
        max_completion_length=config.max_length // 2,
        batch_size=8,
        seed=config.seed,
    )
    table = []
    after = (start, merged.parent / "adapter") if config.load_in_4bit else (merged, None)
    for name, (path, adapter) in {"before": (start, None), "after": after}.items():
        # The model of the last turn goes before the next is loaded.
        release_memory()
        model, tokenizer = load_policy(
            path,
            adapter=adapter,
            max_length=config.max_length,
            load_in_4bit=config.load_in_4bit,
            template=config.template,
            prompt=config.prompt,
            tokenizer=copy.deepcopy(job.tokenizer),
        )
        records = sample_and_grade(
            sampling,
            TransformersEngine(model, tokenizer),
            rows,
            folder / f"{name}.jsonl",
            model=f"{name} SFT",
            benchmark="held-out",
            boxed=False,
            checker=checker,
            prompt=config.prompt,
        )
        del model
        result = signal(records)
        table.append(
            {
                "model": f"{name} SFT",
                "in format": f"{result['format_rate']:.3f}",
                "parsed": f"{result['parsed_rate']:.3f}",
                "right": f"{result['solve_rate']:.3f}",
                "cut": f"{result['truncation_rate']:.3f}",
                "tokens": f"{result['mean_tokens']:.0f}",
            }
        )
    write_json(report, table)
    return table


def ungraded_text(rows: Sequence[dict], checker: Checker) -> str:
    """A note on rows that were to be held out and cannot be graded; empty without any."""
    if not rows:
        return ""
    return (
        f"{len(rows)} of the rows to train on were to be held out, but {checker.name} cannot grade "
        f"their answers, such as {rows[0]['answer']!r:.60}. Choose another --verifier.\n"
    )


def out_of_format(table: Sequence[Mapping[str, str]]) -> str:
    """What to do if no completion is in the format after SFT; empty otherwise."""
    if not table or float(table[-1]["in format"]) > 0:
        return ""
    return (
        "No completion after SFT is in format, and RL learns only from correct answers: train SFT "
        "for more steps, with another --out and --max-steps … (held-out/after.jsonl shows what "
        "was written)."
    )
