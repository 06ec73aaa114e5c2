"""Exports a run's result: an adapter, a merged 16-bit model, or a GGUF file.

Each export is checked before it appears: the adapter is not zero and changes the logits, the merged
model answers like the adapter. The folder is complete or absent, has a model card, and is never
overwritten.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.hub_results import eval_results, named_model, write_eval_results
from sage_unsloth.export.adapter_checks import (
    ADAPTER_FILES,
    check_adapter,
    check_effect,
    check_parity,
    greedy_answers,
)
from sage_unsloth.export.model_card import model_card
from sage_unsloth.models.device import has_gpu, release_memory
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.merging import save_merged
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.models.trained import EXPORT, Run
from sage_unsloth.planning.presets import MODELS
from sage_unsloth.prompts import recorded_format
from sage_unsloth.runs.files import read_json, whole_folder, write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.training.stage import METRICS, read_metrics


class ExportError(RuntimeError):
    """This machine cannot make the export."""


def origin(model_path: str | Path) -> str:
    """Hub id, or name, of the first model in a chain of runs (SFT, then RL, say)."""
    path = Path(model_path)
    while (path.parent / "run.json").exists():
        record = read_json(path.parent / "run.json")
        path = Path(record.get("model_path") or record["settings"]["model"])
    for preset in MODELS.values():
        if path.name == Path(preset.hub_id).name:
            return preset.hub_id
    return path.name if path.exists() or path.is_absolute() else str(path)


def export(
    run: Run,
    to: str,
    out: str | Path,
    *,
    name: str | None = None,
    base_id: str | None = None,
    report: dict | None = None,
    report_model: str | None = None,
    quantization: str = "q4_k_m",
    requested: str | None = None,
) -> Path:
    """Writes the folder `out`, with the model card and a record of the checks.

    Args:
        to: "adapter", "merged" or "gguf".
        name: title of the card and, if it is a hub id, the model in its example, otherwise the
            folder `out`; None takes the run folder's name.
        base_id: hub id of the adapter's base, written into its config and card.
        report: of an evaluation, for the card's pass@k.
        report_model: whose results go to the hub's fields, the card's `model-index` and
            `.eval_results`; None takes the report's only model.
        quantization: of the GGUF file, in Unsloth's names.
        requested: digest of the command's options, for the record, which is pushed too.

    Raises:
        ValueError: `out` exists, or another process exports to it; the run has no such result, or a
            check failed.
        ExportError: GGUF without a GPU.
    """
    out, name = Path(out).absolute(), name or run.folder.absolute().name
    if out.exists():
        raise ValueError(f"an export does not overwrite {out}. Choose another --out, or delete it")
    own = None if report is None else named_model(report, report_model)
    with exclusive_lock(out), whole_folder(out) as partial:
        if to == "adapter":
            checks = _write_adapter(run, partial, base_id)
        elif to == "merged":
            checks = _write_merged(run, partial)
        elif to == "gguf":
            checks = _write_gguf(run, partial, quantization)
        else:
            raise ValueError(f"an export must be adapter, merged or gguf, got {to!r}")
        base = origin(run.model_path)
        licenses = {p.name: p.license for p in MODELS.values()} | {
            p.hub_id: p.license for p in MODELS.values()
        }
        loads_on = base_id or (base if run.model_path == base and "/" in base else None)
        card = model_card(
            kind=to,
            name=name,
            record=run.record,
            # A run may have left none.
            metrics=read_metrics(run.folder) if (run.folder / METRICS).exists() else [],
            base=base,
            license=licenses.get(base),
            loads_on=loads_on,
            loads_from=name if "/" in name else out.name,
            report=report,
            report_model=own,
            checks=checks,
        )
        (partial / "README.md").write_text(card, encoding="utf-8")
        if report is not None and own is not None:
            write_eval_results(partial, eval_results(report, own))
        write_json(
            partial / EXPORT,
            {
                "kind": to,
                "name": name,
                "run": run.record["settings"],
                "base": base,
                "checks": checks,
                "requested": requested,
            },
        )
    return out


def is_export(folder: str | Path, kind: str, name: str, requested: str | None = None) -> bool:
    """Whether the folder is a finished export of this kind and name, with the same options."""
    path = Path(folder) / EXPORT
    if not path.exists():
        return False
    record = read_json(path)
    same = requested is None or record.get("requested") == requested
    return same and (record["kind"], record["name"]) == (kind, name)


def _write_adapter(run: Run, folder: Path, base_id: str | None) -> dict[str, Any]:
    if run.adapter is None:
        raise ValueError(f"{run.folder} trained every weight and has no adapter. Export it merged")
    checks = {"largest |B|": round(check_adapter(run.adapter), 6)}
    model, tokenizer = _policy(run)
    checks["largest change of a logit"] = round(check_effect(model, tokenizer), 4)
    if run.in_4bit:
        answers = greedy_answers(model, tokenizer)
        del model
        release_memory()
        full = load_policy(run.model_path, adapter=run.adapter)[0]
        checks |= _distance(UNQUANTISED_MODEL, check_parity(full, answers, exact=False))
    folder.mkdir()
    for file in ADAPTER_FILES:
        shutil.copy(run.adapter / file, folder / file)
    # A folder is named so that it is found from anywhere.
    below = Path(run.model_path)
    named = base_id or (str(below.absolute()) if below.is_dir() else run.model_path)
    config = read_json(folder / ADAPTER_FILES[0])
    write_json(folder / ADAPTER_FILES[0], config | {"base_model_name_or_path": named})
    tokenizer.save_pretrained(folder)
    return checks


def _write_merged(run: Run, folder: Path) -> dict[str, Any]:
    if run.merged is not None and not (run.in_4bit and run.adapter is not None):
        shutil.copytree(run.merged, folder)
        # Under the template of the run, as it is today: an earlier one had no system prompt.
        settings = run.record["settings"]
        template, prompt = settings.get("template", "project"), recorded_format(settings)
        load_tokenizer(folder, template, prompt=prompt).save_pretrained(folder)
        return {"copied from the run": "model/"}
    assert run.adapter is not None, "`read_run` finds an adapter, a model, or both"
    largest = check_adapter(run.adapter)
    model, tokenizer = _policy(run)
    change = check_effect(model, tokenizer)
    answers = greedy_answers(model, tokenizer)
    save_merged(model, tokenizer, folder, dtype="bfloat16")
    del model  # two models at once would be too much for a card that holds one
    release_memory()
    # On a GPU Unsloth merges into the weights before they were quantised.
    exact = not (run.in_4bit and has_gpu())
    parity = check_parity(load_policy(folder)[0], answers, exact=exact)
    checks = {
        "largest |B|": round(largest, 6),
        "largest change of a logit": round(change, 4),
    }
    if run.in_4bit:
        return checks | _distance(MERGED_MODEL, parity)
    return checks | {
        "greedy tokens that agree with base and adapter": f"{parity['agreement']:.1%}",
        "rounding to 16 bits, in units of what training changed": f"{parity['distance']:.1%}",
    }


def _policy(run: Run) -> tuple[Any, Any]:
    return load_policy(run.model_path, adapter=run.adapter, load_in_4bit=run.in_4bit)


UNQUANTISED_MODEL = "the adapter on the model before it was quantised"
MERGED_MODEL = "the merged model"


def _distance(what: str, parity: Mapping[str, float]) -> dict[str, str]:
    """The distance from the policy that was trained on 4-bit weights, for the card."""
    return {
        f"KL of {what} to the policy in 4 bits, nats a token": f"{parity['kl']:.2g}",
        "greedy tokens that agree": f"{parity['agreement']:.1%}",
        "distance in logits, in units of what training changed": f"{parity['distance']:.1%}",
    }


def _write_gguf(run: Run, folder: Path, quantization: str) -> dict[str, Any]:
    if not has_gpu():
        raise ExportError(
            "a GGUF export needs a GPU, and this machine has none. Export merged here, and convert "
            "that folder with llama.cpp's convert_hf_to_gguf.py"
        )
    checks = {}
    if run.adapter is not None:
        checks["largest |B|"] = round(check_adapter(run.adapter), 6)
        model, tokenizer = load_policy(run.model_path, adapter=run.adapter)
        checks["largest change of a logit"] = round(check_effect(model, tokenizer), 4)
    else:
        assert run.merged is not None, "`read_run` finds an adapter, a model, or both"
        model, tokenizer = load_policy(run.merged)
    from unsloth.save import patch_saving_functions

    folder.mkdir()
    patched: Any = patch_saving_functions(model)
    made = patched.save_pretrained_gguf(
        str(folder / "work"), tokenizer, quantization_method=quantization
    )
    for file in made["gguf_files"]:
        shutil.move(file, folder / Path(file).name)
    for leftover in ("work", "work_gguf"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    return checks | {"quantization": quantization}
