"""Stage 2 as a user starts it, from the command line or a notebook; and what both stages print."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_unsloth.figures import show_table
from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.reward_functions import Reward, get_rewards
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.embedded import is_small, settle_process
from sage_unsloth.models.templates import choose_format
from sage_unsloth.models.tokenizers import open_tokenizer
from sage_unsloth.planning.fitting import check_fits, memory_of_card
from sage_unsloth.planning.plan import memory_report, run_report, step_plan
from sage_unsloth.planning.presets import ModelPreset
from sage_unsloth.problems.columns import Columns
from sage_unsloth.problems.corpora import (
    RL_DATA,
    rl_corpus,
    rl_rows,
)
from sage_unsloth.runs.processes import rank, wait_for_all
from sage_unsloth.runs.storage import check_room
from sage_unsloth.runs.text import log_to_terminal
from sage_unsloth.trainers.backends import load_backend
from sage_unsloth.training.algorithms import ALGORITHMS, Algorithm, get_algorithm
from sage_unsloth.training.figures import plot_training
from sage_unsloth.training.held_out_rows import check_evaluations
from sage_unsloth.training.ledger import Ledger
from sage_unsloth.training.outcomes import (
    HELD_OUT,
    evaluation_command,
    finished_text,
    outcome,
    verifier_options,
)
from sage_unsloth.training.own_algorithms import own_code
from sage_unsloth.training.rlvr_checks import check_fills_a_step, check_judges, check_request
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_job import recorded_guide
from sage_unsloth.training.rlvr_stage import resolve_rlvr, run_rlvr_job
from sage_unsloth.training.stage import (
    known_settings,
    read_metrics,
)
from sage_unsloth.training.starting import (
    EMBEDDED,
    SMOKE,
    merge_run,
    model_path,
    rlvr_config,
    run_setup,
    starting_point,
)


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
    """Stage 2: check the settings, plan, filter the prompts, train, and draw the training curves.

    Under torchrun every process calls this, and the first one reports.

    Args:
        out: folder of the run; a second run in it resumes.
        algorithm: the name of a row of `algorithms.ALGORITHMS`, or an `Algorithm`.
        start: folder of an SFT or RL run, a preset's name, a model folder or a hub id; for its
            π_ref see `starting.starting_point`.
        data, path, columns, limit: see `corpora.rl_rows`; the embedded model has its own data.
        memory: of the GPU, GiB, for the plan; None asks the GPU.
        smoke: a run of seconds that only checks that everything works.
        force: train even if the preflight finds nothing to learn from; implied by `smoke`.
        rewards, callbacks: see `rlvr`.
        eval_file: rows for the held-out curve, in the columns of `path`; None holds rows of the
            data out.
        verifier, allow_unconfined: see `verifiers.get_verifier`; None for the verifier of the data,
            usually `math`.
        command: the words of the command, for `run.json`.
        settings: fields of `RlvrConfig`, which win over preset and algorithm.

    Returns:
        The rows of `metrics.jsonl`, one per optimizer step.

    Raises:
        ValueError: see `rlvr` and `rl_corpus`; or the run does not fit the GPU, with what to
            change.
    """
    show_log()
    requested = get_rewards(rewards)
    # Cheap checks first: every wrong setting is refused before data or a model is loaded.
    checker = None
    if verifier is not None:
        checker = get_verifier(verifier, allow_unconfined=allow_unconfined)
    if isinstance(algorithm, str):
        algorithm = get_algorithm(algorithm)
    # A custom algorithm may run under any settings.
    if algorithm.name in ALGORITHMS:
        algorithm.check_name(settings)
    algorithm = algorithm.with_settings(settings)
    point = starting_point(start, settings.get("reference", RlvrConfig.reference))
    gib = memory_of_card(memory)
    changes = (SMOKE["rlvr"] if smoke else {}) | settings | algorithm.all_settings()
    ledger = Ledger(out, "rlvr")
    config = rlvr_config(point.preset, gib, ledger.recorded_settings(), **changes)
    prompt = choose_format(point.model, settings.get("prompt"), point.adapter)
    config = replace(config, prompt=prompt)
    check_request(config)
    setup = run_setup(point.preset, config, gib)
    show(f"{algorithm.name} from {start} -> {out}\n{algorithm.description}\n")
    # A finished run is reported again, with its settings and rows checked.
    done = ledger.result()
    if done is not None:
        show(finished_text(out, done))
    elif point.preset.name != EMBEDDED:
        show(f"{memory_report(setup, point.preset.name, gib)}\n")
    if gib is not None and done is None:
        check_fits(setup, gib)
    data = data or default_data(point.preset, path, "dapo")
    reading: dict[str, Any] = {
        "columns": columns,
        "verifier": checker,
        "answered": any(reward.function is None for reward in requested),
    }
    result = rl_rows(data=data, path=path, limit=limit, **reading)
    for_curve = None
    if eval_file is not None:
        # Custom rows for the curve have the columns of the custom training data.
        own = {"data": str(eval_file)}
        known_columns = {"data": "dapo", "path": eval_file}
        # A split is the hub's.
        in_file = columns and replace(columns, split=None)
        where = known_columns if data in RL_DATA else own
        for_curve = rl_rows(**where, **(reading | {"columns": in_file}))
    given = None if for_curve is None else len(for_curve.rows)
    check_evaluations(config, given, graded=reading["answered"])
    check_fills_a_step(config, len(result.rows))
    check_judges(requested, result.checker, result.rows, config.reward_seconds)
    if rank() == 0:
        # Other settings are refused before the libraries are loaded.
        known = known_settings("rlvr", config, point.model, guide=recorded_guide(algorithm.guide))
        known |= own_code(algorithm.guide, config.advantages, config.token_advantages)
        # The model does not exist yet, so its digest is compared only after the merge.
        if point.unmerged:
            del known["model"]
        ledger.compare(known)
    # Unsloth must be imported before transformers, which the tokenizer loads.
    load_libraries(point.preset, config.optim, config.backend, standby=setup.use_vllm and has_gpu())
    # One process merges; the others wait for the folder.
    if point.unmerged and rank() == 0:
        merge_run(point.unmerged)
    wait_for_all()
    expected = settings.get("template")
    tokenizer, template = open_tokenizer(point.model, expected, point.adapter, config.prompt)
    config = replace(config, template=template.template)
    show(f"{point}\n{template}\n{result.origin()}\n")
    corpus = rl_corpus(tokenizer, config.max_prompt_length, source=result)
    show(corpus.table())
    for text in filter(None, (corpus.left_out_text(), corpus.duplicates_text())):
        show(text)
    held_out, origin = None, corpus.record(path or data)
    if for_curve is not None:
        selected = rl_corpus(tokenizer, config.max_prompt_length, source=for_curve)
        held_out, origin["held_out"] = selected.rows, selected.record(eval_file)
        show(f"\nHeld-out rows, of {eval_file}:\n")
        show(selected.table())
    if done is None:
        show(f"\n{run_report(setup, config.max_steps, len(corpus.rows))}\n")
        check_room(out, round(step_plan(setup, config.max_steps).disk_bytes))
    # Judged above already, so `resolve_rlvr` does not repeat those checks.
    job = resolve_rlvr(
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
        tokenizer=tokenizer,
        judged=True,
    )
    trained = run_rlvr_job(job)
    metrics = read_metrics(out)
    if rank() == 0:
        note = f"{point.preset.name}, seed {config.seed}"
        course = {algorithm.name: read_metrics(out, first=0)}
        plot_training(course, Path(out) / "training.png", note)
        for part in outcome(Path(out), metrics, config.prompt):
            show(part)
        following = evaluation_command(
            point,
            algorithm.name,
            Path(out),
            config,
            smoke=smoke,
            data=own_data(data, path, columns, RL_DATA),
            columns=columns,
            eval_file=eval_file,
            verifier=verifier_options(checker, allow_unconfined=allow_unconfined),
        )
        show(
            f"\nWritten to {out}: metrics.jsonl, completions.jsonl, training.png, "
            f"{trained.name}/\n\nNext: {following}"
        )
        if HELD_OUT in following:
            show(f"{HELD_OUT} stands for a file of questions that were not trained on.")
    return metrics


def show(content: str | Sequence[Mapping]) -> None:
    if isinstance(content, str):
        print(content)
    else:
        show_table(content)


def show_log() -> None:
    """Shows the log of the package (preflight, fallbacks, pace) if logging is not set up."""
    log_to_terminal()
    logging.getLogger("sage_unsloth").setLevel(logging.INFO)


def load_libraries(
    preset: ModelPreset, optim: str, expected: str | None = None, *, standby: bool = False
) -> None:
    """Loads the backend: Unsloth must come before anything imports transformers.

    Raises:
        ValueError: transformers has no optimizer of that name.
    """
    load_backend(expected, standby=standby)
    from transformers.training_args import OptimizerNames

    names = ["auto", *(name.value for name in OptimizerNames)]
    if optim not in names:
        raise ValueError(f"optim must be one of {', '.join(names)}, got {optim!r}")
    if is_small(model_path(preset)):
        settle_process()


def own_data(
    data: str, path: str | Path | None, columns: Columns | None, known: Sequence[str]
) -> str | None:
    """Custom data as an argument of `--data`; None for a known data set, or a copy of one."""
    if path is not None and columns:
        return str(path)
    return None if data in known else data


def default_data(preset: ModelPreset, path: str | Path | None, corpus: str) -> str:
    """The model's default data set; the embedded model has its own."""
    return "arithmetic" if preset.name == EMBEDDED and path is None else corpus
