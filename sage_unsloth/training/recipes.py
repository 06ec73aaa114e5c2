"""The two stages as a person starts them, from the command line or a notebook: data, plan,
training, table, next command.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_unsloth.figures import show_table
from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.reward_functions import Reward, get_rewards
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.models.device import frees_models, has_gpu
from sage_unsloth.models.embedded import is_small, settle_process
from sage_unsloth.models.templates import choose_format
from sage_unsloth.models.tokenizers import load_tokenizer, template_for
from sage_unsloth.planning.fitting import check_fits, memory_of_card
from sage_unsloth.planning.plan import memory_report, run_report, step_plan
from sage_unsloth.planning.presets import ModelPreset, model_preset
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.corpora import (
    RL_DATA,
    SFT_DATA,
    rl_corpus,
    rl_rows,
    sft_corpus,
    sft_rows,
)
from sage_unsloth.problems.corpus import check_limit
from sage_unsloth.problems.gradable import gradable
from sage_unsloth.problems.held_out import hold_out
from sage_unsloth.runs.processes import rank, wait_for_all
from sage_unsloth.runs.storage import check_room
from sage_unsloth.runs.text import log_to_terminal
from sage_unsloth.trainers.backends import load_backend
from sage_unsloth.training.algorithms import ALGORITHMS, Algorithm, get_algorithm
from sage_unsloth.training.figures import plot_training
from sage_unsloth.training.held_out_rows import check_evaluations
from sage_unsloth.training.outcomes import (
    SAMPLES,
    before_and_after,
    evaluation_command,
    finished_text,
    out_of_format,
    outcome,
    result_of,
    training_command,
    ungraded_text,
    verifier_options,
)
from sage_unsloth.training.own_algorithms import own_code
from sage_unsloth.training.rlvr_checks import check_fills_a_step, check_judges, check_request
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_job import recorded_guide
from sage_unsloth.training.rlvr_stage import resolve, run_job
from sage_unsloth.training.sft_stage import SftConfig, sft
from sage_unsloth.training.stage import (
    check_folder,
    check_tracker,
    known_settings,
    read_metrics,
)
from sage_unsloth.training.starting import (
    EMBEDDED,
    SMOKE,
    merge_run,
    model_path,
    recorded_settings,
    rlvr_config,
    setup_of,
    sft_config,
    starting_point,
)


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
        held_out: rows kept from training for the comparison; 0 leaves it out.
        smoke: a run of seconds that only shows that everything works.
        verifier, allow_unconfined: as for `run_rlvr`; where its references are not answers, such as
            tests of a program, solutions are taught as they are.
        command: the words that started it, for `run.json`.
        settings: fields of `SftConfig`, in place of the preset's.

    Returns:
        The comparison: shares of completions in format, parsed, right and cut, before and after.

    Raises:
        ValueError: see `sft` and `sft_corpus`.
    """
    _show_log()
    changes = (SMOKE["sft"] if smoke else {}) | settings
    check_tracker(SftConfig(**changes).report_to)
    check_limit(limit)
    preset = model_preset(model)
    start = model_path(preset)
    config = sft_config(preset, recorded_settings(out, "sft"), **changes)
    config = replace(config, prompt=choose_format(start, settings.get("prompt")))
    if (done := result_of(out, "sft")) is not None:
        _show(finished_text(out, done))
    data = data or _default_data(preset, path, "openmath")
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
    check_folder(out, known_settings("sft", config, start))
    _load_libraries(preset)
    template = template_for(start, settings.get("template"), prompt=config.prompt)
    config = replace(config, template=template.template)
    tokenizer = load_tokenizer(start, config.template, prompt=config.prompt)
    corpus = sft_corpus(tokenizer, config.max_length, source=result, prompt=config.prompt)
    # Without answers there is nothing to compare.
    answered = all("answer" in row for row in corpus.rows)
    training, selected = hold_out(corpus.rows, min(held_out, len(corpus.rows) // 4) * answered)
    dropped = len(corpus.rows) - len(training) - len(selected)
    graded = gradable(selected, checker or MATH)
    ungraded = [row for row, good in zip(selected, graded, strict=True) if not good]
    selected = [row for row, good in zip(selected, graded, strict=True) if good]
    training += ungraded
    steps = config.max_steps
    if steps == -1:
        steps = -(-len(training) // config.batch_size) * config.epochs
    _show(f"SFT of {preset.name} -> {out}\n{template}\n{corpus.origin()}\n")
    _show(corpus.table())
    for text in filter(None, (corpus.named(), corpus.repeated())):
        _show(text)
    _show(
        f"\n{len(training):,} rows to train on, {len(selected)} held out, {dropped} left out "
        f"because they share a problem with these. {steps:,} steps of {config.batch_size}.\n"
        + ungraded_text(ungraded, checker or MATH)
    )
    if done is None:  # the merged model; one of the hub is not looked at
        check_room(out, sum(file.stat().st_size for file in Path(start).glob("*.safetensors")))
    merged = sft(config, start, training, out, data=corpus.record(path or data), command=command)
    rollouts = rlvr_config(preset)
    table = (
        before_and_after(config, start, merged, selected, out, checker or MATH, rollouts)
        if selected
        else []
    )
    if table:
        _show(
            f"\n{len(selected)} held-out rows, {SAMPLES} completions each, sampled as in RL "
            f"(temperature {rollouts.temperature:g}, min-p {rollouts.min_p:g}):\n"
        )
        _show(table)
    if not smoke and (text := out_of_format(table)):
        _show(f"\n{text}")
        return table
    own = _own_data(data, path, columns, SFT_DATA)
    command = training_command(
        out,
        config,
        sft_config(preset).max_length,
        smoke=smoke,
        data=own,
        columns=columns,
        verifier=verifier_options(checker, allow_unconfined=allow_unconfined),
    )
    _show(f"\nNext: {command}")
    return table


def run_rlvr(
    out: str | Path,
    *,
    algorithm: str | Algorithm,
    start: str | Path,
    data: str | None = None,
    path: str | Path | None = None,
    columns: Columns | None = None,
    limit: int | None = None,
    memory: float | None = None,
    smoke: bool = False,
    force: bool = False,
    rewards: Sequence[Reward | str | Callable[..., Any]] | None = None,
    verifier: Checker | str | Callable[[str, str], Any] | None = None,
    allow_unconfined: bool = False,
    callbacks: Sequence[Any] = (),
    eval_file: str | Path | None = None,
    command: Sequence[str] = (),
    **settings: Any,
) -> list[dict]:
    """Stage 2: judge the settings, plan, filter the prompts, train, and draw the course.

    Under torchrun every process calls this, and the first one reports.

    Args:
        out: folder of the run; a second run in it resumes.
        algorithm: the name of a row of `algorithms.ALGORITHMS`, or an `Algorithm` of your own.
        start: folder of an SFT run or, for a second stage, of an RL run; or a preset's name, a
            model folder or a hub id. `starting.starting_point` says which π_ref each has.
        data, path, columns, limit: see `corpora.rl_rows`; the embedded model has its own data.
        memory: of the card, GiB, for the plan; None asks the card.
        smoke: a run of seconds that only shows that everything works.
        force: train also where the preflight finds nothing to learn from; `smoke` implies it.
        rewards, callbacks: see `rlvr`.
        eval_file: rows for the held-out curve, in the columns of `path`; None holds rows of the
            data out.
        verifier, allow_unconfined: what makes an answer right, as `verifiers.get_verifier` takes
            them; None for that of the data, `math` but for tasks of reasoning-gym.
        command: the words that started it, for `run.json`.
        settings: fields of `RlvrConfig`, in place of the preset's and of the algorithm's.

    Returns:
        The rows of `metrics.jsonl`, one an optimizer step.

    Raises:
        ValueError: see `rlvr` and `rl_corpus`; or the run does not fit the card, with what to
            change.
    """
    _show_log()
    requested = get_rewards(rewards)
    checker = None
    if verifier is not None:
        checker = get_verifier(verifier, allow_unconfined=allow_unconfined)
    if isinstance(algorithm, str):
        algorithm = get_algorithm(algorithm)
    if algorithm.name in ALGORITHMS:  # one of your own may be run under any settings
        algorithm.check_name(settings)
    algorithm = algorithm.with_settings(settings)
    point = starting_point(start, settings.get("reference", RlvrConfig.reference))
    gib = memory_of_card(memory)
    changes = (SMOKE["rlvr"] if smoke else {}) | settings | algorithm.decided()
    config = rlvr_config(point.preset, gib, recorded_settings(out, "rlvr"), **changes)
    prompt = choose_format(point.model, settings.get("prompt"), point.adapter)
    config = replace(config, prompt=prompt)
    check_request(config)
    setup = setup_of(point.preset, config, gib)
    _show(f"{algorithm.name} from {start} -> {out}\n{algorithm.description}\n")
    done = result_of(out, "rlvr")
    if done is not None:
        _show(finished_text(out, done))
    elif point.preset.name != EMBEDDED:
        _show(f"{memory_report(setup, point.preset.name, gib)}\n")
    if gib is not None and done is None:
        check_fits(setup, gib)
    data = data or _default_data(point.preset, path, "dapo")
    reading: dict[str, Any] = {
        "columns": columns,
        "verifier": checker,
        "answered": any(reward.function is None for reward in requested),
    }
    result = rl_rows(data=data, path=path, limit=limit, **reading)
    for_curve = None
    if eval_file is not None:
        own = {"data": str(eval_file)}  # beside data of one's own, in the same columns
        known_columns = {"data": "dapo", "path": eval_file}
        for_curve = rl_rows(**(known_columns if data in RL_DATA else own), **reading)
    given = None if for_curve is None else len(for_curve.rows)
    check_evaluations(config, given, graded=reading["answered"])
    check_fills_a_step(config, len(result.rows))
    check_judges(requested, result.checker, result.rows, config.reward_seconds)
    if rank() == 0:
        known = known_settings("rlvr", config, point.model, guide=recorded_guide(algorithm.guide))
        known |= own_code(algorithm.guide, config.advantages, config.token_advantages)
        if point.unmerged:
            del known["model"]
        check_folder(out, known)
    _load_libraries(point.preset, config.backend, standby=setup.use_vllm and has_gpu())
    if point.unmerged and rank() == 0:
        merge_run(point.unmerged)
    wait_for_all()
    template = template_for(point.model, settings.get("template"), point.adapter, config.prompt)
    config = replace(config, template=template.template)
    _show(f"{point}\n{template}\n{result.origin()}\n")
    tokenizer = load_tokenizer(point.model, config.template, point.adapter, config.prompt)
    corpus = rl_corpus(tokenizer, config.max_prompt_length, source=result)
    _show(corpus.table())
    for text in filter(None, (corpus.named(), corpus.repeated())):
        _show(text)
    held_out, origin = None, corpus.record(path or data)
    if for_curve is not None:
        selected = rl_corpus(tokenizer, config.max_prompt_length, source=for_curve)
        held_out, origin["held_out"] = selected.rows, selected.record(eval_file)
        _show(f"\nHeld-out rows, of {eval_file}:\n")
        _show(selected.table())
    if done is None:
        _show(f"\n{run_report(setup, config.max_steps, len(corpus.rows))}\n")
        check_room(out, round(step_plan(setup, config.max_steps).disk_bytes))
    job = resolve(
        config,
        point.model,
        corpus.rows,
        out,
        algorithm.guide,
        algorithm.name,
        adapter=point.adapter,
        held_out=held_out,
        callbacks=callbacks,
        force=force or smoke,
        rewards=requested,
        verifier=corpus.checker,
        data=origin,
        command=command,
        judged=True,
    )
    trained = run_job(job)
    metrics = read_metrics(out)
    if rank() == 0:
        note = f"{point.preset.name}, seed {config.seed}"
        course = {algorithm.name: read_metrics(out, first=0)}
        plot_training(course, Path(out) / "training.png", note)
        for part in outcome(Path(out), metrics, config.prompt):
            _show(part)
        _show(
            f"\nWritten to {out}: metrics.jsonl, completions.jsonl, training.png, "
            f"{trained.name}/\n\nNext: "
            + evaluation_command(
                point,
                algorithm.name,
                Path(out),
                config,
                smoke=smoke,
                data=_own_data(data, path, columns, RL_DATA),
                columns=columns,
                eval_file=eval_file,
                verifier=verifier_options(checker, allow_unconfined=allow_unconfined),
            )
        )
    return metrics


def _show(content: str | Sequence[Mapping]) -> None:
    """Text or a table on the terminal of the person who started the recipe."""
    if isinstance(content, str):
        print(content)
    else:
        show_table(content)


def _show_log() -> None:
    """Show what the package logs (preflight, fallbacks, pace) where nobody set up logging."""
    log_to_terminal()
    logging.getLogger("sage_unsloth").setLevel(logging.INFO)


def _load_libraries(
    preset: ModelPreset, expected: str | None = None, *, standby: bool = False
) -> None:
    """Once the cheap checks have passed: Unsloth, before anything imports transformers, or not."""
    load_backend(expected, standby=standby)
    if is_small(model_path(preset)):
        settle_process()


def _own_data(
    data: str, path: str | Path | None, columns: Columns | None, known: Sequence[str]
) -> str | None:
    """The user's own data, as `--data` takes them; None for a known data set, or a copy of one."""
    if path is not None and columns:
        return str(path)
    return None if data in known else data


def _default_data(preset: ModelPreset, path: str | Path | None, corpus: str) -> str:
    """The embedded model has its own data, unless a file in a corpus's columns is given."""
    return "arithmetic" if preset.name == EMBEDDED and path is None else corpus
