"""The command line: `python -m sage_unsloth quickstart | doctor | plan | export`."""

import argparse
import logging
import sys


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; 0 for success, 1 for a failed check, 2 for bad input (the message says what to do)."""
    parser = argparse.ArgumentParser(prog="python -m sage_unsloth", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    quickstart = commands.add_parser(
        "quickstart", help="SFT, GRPO, SAGE-Branch and pass@k on the embedded task"
    )
    quickstart.add_argument(
        "--out", default="runs/quickstart", help="folder of the run (default: %(default)s)"
    )
    quickstart.add_argument(
        "--smoke", action="store_true", help="a minute's run that only shows that it works"
    )
    commands.add_parser(
        "doctor", help="versions, device, memory, patch contract: what is missing, and the remedy"
    )
    _add_plan(commands)
    _add_export(commands)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # The two commands load different amounts, so each imports its own.
    if options.command == "doctor":
        from sage_unsloth import doctor

        return 1 if doctor.run() else 0
    if options.command == "plan":
        return _plan(options)
    if options.command == "export":
        return _export(options)
    from sage_unsloth import quickstart as stage
    from sage_unsloth.patch import ContractError

    try:
        stage.run(options.out, stage.smoke_config() if options.smoke else None)
    except (ValueError, ContractError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _add_plan(commands: argparse._SubParsersAction) -> None:
    plan = commands.add_parser("plan", help="what an RL run needs and whether it fits, before anything is loaded")  # fmt: skip
    plan.add_argument("--model", help="a preset, a folder or a hub id; without it, the table of all presets and cards")  # fmt: skip
    plan.add_argument("--memory", type=float, help="of the card, GiB; 16, 24, 40, 48 and 80 mean such a card (default: this machine's)")  # fmt: skip
    plan.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: %(default)s)")  # fmt: skip
    plan.add_argument("--rows", type=int, help="of the training data")
    plan.add_argument("--first-step-seconds", type=float, help="measured, for the time of the run")
    for name in ("prompts-per-step", "num-generations", "max-prompt-length", "max-completion-length", "micro-batch", "lora-rank"):  # fmt: skip
        plan.add_argument(f"--{name}", type=int, help="instead of the preset's")
    plan.add_argument("--weight-bits", type=int, choices=(4, 16, 32), help="instead of the preset's")  # fmt: skip
    plan.add_argument("--rollouts", choices=("vllm", "transformers"), help="instead of the preset's")  # fmt: skip


def _plan(options: argparse.Namespace) -> int:
    from sage_unsloth import plan
    from sage_unsloth.plots import show_table
    from sage_unsloth.presets import model_preset

    if options.model is None:
        show_table(plan.what_fits())
        return 0
    names = ("prompts_per_step", "num_generations", "max_prompt_length", "max_completion_length", "micro_batch", "lora_rank", "weight_bits")  # fmt: skip
    changes = {name: getattr(options, name) for name in names}
    if options.rollouts is not None:
        changes["use_vllm"] = options.rollouts == "vllm"
    try:
        model = model_preset(options.model)
        memory = plan.memory_of_card(options.memory)
        setup = plan.plan_setup(model, memory, **changes)
        print(plan.report(setup, model.name, memory, options.steps, options.rows, options.first_step_seconds))  # fmt: skip
        if memory is not None:
            plan.check_fits(setup, memory)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser("export", help="a run's result as an adapter, a merged model, GGUF, or on the hub")  # fmt: skip
    export.add_argument("run", help="folder of an SFT or RL run")
    export.add_argument("--to", required=True, choices=("adapter", "merged", "gguf", "hub"))
    export.add_argument("--out", help="new folder (default: export-KIND in the run's)")
    export.add_argument("--model", help="the model that the run started from, where run.json does not name it")  # fmt: skip
    export.add_argument("--base-id", help="hub id of the model that the adapter belongs on")
    export.add_argument("--report", help="an evaluation's report.json, for the model card")
    export.add_argument("--quantization", default="q4_k_m", help="of GGUF (default: %(default)s)")
    export.add_argument("--repo-id", help="for --to hub: owner/name")
    export.add_argument("--kind", default="adapter", choices=("adapter", "merged", "gguf"), help="for --to hub: what is pushed (default: %(default)s)")  # fmt: skip
    export.add_argument("--public", action="store_true", help="for --to hub: visible to everyone")


def _export(options: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from sage_unsloth import export as stage
    from sage_unsloth.hub import push

    hub = options.to == "hub"
    kind = options.kind if hub else options.to
    out = Path(options.out or Path(options.run) / ("export-hub" if hub else f"export-{kind}"))
    try:
        if hub and options.repo_id is None:
            raise ValueError("--to hub needs the repository's name; give --repo-id owner/name")
        # A push that failed goes on from the export that it made.
        if not (hub and stage.is_export(out, kind, options.repo_id)):
            run = stage.read_run(options.run, options.model)
            report = None if options.report is None else json.loads(Path(options.report).read_text())  # fmt: skip
            stage.export(run, kind, out, name=options.repo_id, base_id=options.base_id, report=report, quantization=options.quantization)  # fmt: skip
        print(f"written to {out}")
        if hub:
            print(push(out, options.repo_id, private=not options.public))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
