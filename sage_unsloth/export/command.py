"""The command `export`: a run's result, for use elsewhere."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from sage_unsloth.export.model_card import KINDS


def add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export", help="save a run's result as an adapter, a merged model or GGUF, or push it"
    )
    parser.add_argument("run", help="folder of an SFT or RL run")
    parser.add_argument("--to", required=True, choices=(*KINDS, "hub"))
    parser.add_argument("--out", help="new folder (default: export-KIND in the run's folder)")
    parser.add_argument(
        "--which",
        default="last",
        choices=("last", "best"),
        help="the result of the last step, or of the best held-out evaluation (default: "
        "%(default)s)",
    )
    parser.add_argument("--model", help="start model of the run, if run.json does not name it")
    parser.add_argument("--base-id", help="hub id of the model that the adapter belongs on")
    parser.add_argument("--report", help="an evaluation's report.json, for the model card")
    parser.add_argument(
        "--report-model",
        metavar="NAME",
        help="name of this model in the report; its results go into the card's model-index and "
        ".eval_results (default: the only model in the report)",
    )
    parser.add_argument("--quantization", default="q4_k_m", help="of GGUF (default: %(default)s)")
    parser.add_argument("--repo-id", help="for --to hub: owner/name")
    parser.add_argument(
        "--kind",
        default="adapter",
        choices=list(KINDS),
        help="for --to hub: what is pushed (default: %(default)s)",
    )
    parser.add_argument("--public", action="store_true", help="for --to hub: visible to everyone")
    parser.set_defaults(act=_export)


def _export(options: argparse.Namespace) -> int:
    from sage_unsloth.export.exporter import export, is_export
    from sage_unsloth.export.hub import find_token, push, refuse_folder
    from sage_unsloth.models.trained import read_run

    hub = options.to == "hub"
    kind = options.kind if hub else options.to
    default = f"export-{'hub' if hub else kind}{'-best' if options.which == 'best' else ''}"
    out = Path(options.out or Path(options.run) / default)
    if hub and options.repo_id is None:
        raise ValueError("--to hub needs --repo-id owner/name")
    if hub:
        find_token()
    if options.report_model and not options.report:
        raise ValueError("--report-model needs --report report.json")
    report = None if options.report is None else _read_report(options.report)
    # After a push that failed, the same command pushes the export that is there.
    names = ("base_id", "which", "report_model", "model", "quantization")
    given = {name: getattr(options, name) for name in names} | {"card": report}
    requested = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]
    if not (hub and is_export(out, kind, options.repo_id, requested)):
        run = read_run(options.run, options.model, options.which)
        if hub and kind == "adapter" and run.adapter is not None and options.base_id is None:
            refuse_folder(str(run.model_path))
        export(
            run,
            kind,
            out,
            name=options.repo_id,
            base_id=options.base_id,
            report=report,
            report_model=options.report_model,
            quantization=options.quantization,
            requested=requested,
        )
    print(f"written to {out}")
    if hub:
        print(push(out, options.repo_id, private=not options.public))
    return 0


def _read_report(path: str) -> dict:
    """An evaluation's report.json, for the model card."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        report = None
    if not isinstance(report, dict) or "pass_at_k" not in report:
        raise ValueError(f"--report must be the report.json of an evaluation, got {path}")
    return report
