"""`evaluate` by the real vLLM on a CPU, beside transformers: the same figures, sets of its own, and
what a killed process or a dead engine leaves.
"""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from real_engine import BASE, make_adapter

from sage_unsloth.evaluation import evaluator
from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.runs.files import read_json, read_jsonl
from sage_unsloth.sampling.engine_errors import EngineError
from sage_unsloth.sampling.engines import SamplingConfig

pytestmark = pytest.mark.vllm_cpu

SHORT = SamplingConfig(temperature=1.0, num_samples=8, max_completion_length=32, batch_size=64)


def arithmetic(problems):
    return [evaluator.parse_benchmark("arithmetic", problems=problems)]


def records(out, name="base"):
    rows = read_jsonl(out / "samples" / "arithmetic" / f"{name}.jsonl")
    return {(row["problem_id"], row["sample"]): row["completion"] for row in rows}


def right(out, name):
    """Right answers of each problem, as a share, and completions of each."""
    found = {}
    for row in read_jsonl(out / "samples" / "arithmetic" / f"{name}.jsonl"):
        found.setdefault(row["problem_id"], []).append(row["grade"] == "correct")
    (count,) = {len(grades) for grades in found.values()}
    return {problem: sum(grades) / count for problem, grades in found.items()}, count


@pytest.mark.parametrize(("problems", "samples", "adapted"), [(50, 100, False), (20, 20, True)])
def test_both_engines_find_the_same_pass_at_1(tmp_path, problems, samples, adapted):
    """1,000 completions of the base by each engine, and 400 with an adapter."""
    adapter = make_adapter(tmp_path / "adapter", 20, 3, std=0.005) if adapted else None
    spec = ModelSpec(name="m", path=str(BASE), adapter=adapter and str(adapter))
    config = replace(
        SHORT, num_samples=samples, temperature=0.5, max_completion_length=56, batch_size=256
    )
    for engine in ("vllm", "transformers"):
        evaluator.evaluate_models(
            [spec], arithmetic(problems), tmp_path / engine, config, engine=engine
        )
    (found, count), (other, _) = (right(tmp_path / e, "m") for e in ("vllm", "transformers"))
    assert len(found) == problems and count == samples
    difference = sum(found[p] - other[p] for p in found) / problems
    variance = sum(q[p] * (1 - q[p]) for q in (found, other) for p in q)
    variance /= (samples - 1) * problems**2
    assert abs(difference) < 3.5 * math.sqrt(variance)
    assert sum(found.values()) / problems > 0.02, "there is something to compare"
    settings = read_json(tmp_path / "vllm/samples/arithmetic/m.settings.json")
    assert settings["settings"]["dtype"] == "float32"
    assert settings["engine_arguments"]["enforce_eager"] is True
    with pytest.raises(ValueError, match='engine was "vllm" and is "transformers"'):
        evaluator.evaluate_models(
            [spec], arithmetic(problems), tmp_path / "vllm", config, engine="transformers"
        )


def command(out, *more):
    sampling = ["--n", "24", "--temperature", "1", "--max-tokens", "32", "--batch", "32"]
    return [
        sys.executable, "-m", "sage_unsloth", "evaluate", "--models", f"base={BASE}",
        "--benchmarks", "arithmetic", "--problems", "8", "--engine", "vllm", "--out", str(out),
        "--engine-set", "max_num_seqs=8", *sampling, *more,
    ]  # fmt: skip


def test_a_killed_process_leaves_what_was_drawn_and_the_same_command_draws_the_rest(tmp_path):
    def run(out):
        subprocess.run(command(out), check=True, capture_output=True, timeout=500)

    run(tmp_path / "whole")
    out = tmp_path / "killed"
    file = out / "samples" / "arithmetic" / "base.jsonl"
    process = subprocess.Popen(
        command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not (file.exists() and file.read_text().count("\n") >= 8):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = records(out)
    assert 8 <= len(kept) < 192
    run(out)
    found, whole = records(out), records(tmp_path / "whole")
    assert found.keys() == whole.keys() and len(read_jsonl(file)) == 192
    assert kept.items() <= found.items()
    # A request's logits depend on its batch in the last bits, so a rare completion may differ.
    assert sum(found[key] != whole[key] for key in whole) <= 2


def test_an_engine_that_dies_in_a_call_keeps_what_was_drawn(tmp_path, monkeypatch):
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    models = [ModelSpec(name="base", path=str(BASE))]
    out, execute = tmp_path / "out", CPUModelRunner.execute_model
    count = [0]

    def dying(self, *args, **kwargs):
        count[0] += 1
        if count[0] == 80:  # behind the first call: a completion has 32 tokens at most
            raise RuntimeError("the device is gone")
        return execute(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(CPUModelRunner, "execute_model", dying)
        config = replace(SHORT, batch_size=16)
        with pytest.raises(EngineError, match=r"the engine failed with .*saved in .* same command"):
            evaluator.evaluate_models(models, arithmetic(8), out, config, engine="vllm")
    kept = records(out)
    assert 0 < len(kept) < 64
    evaluator.evaluate_models(models, arithmetic(8), out, config, engine="vllm")
    assert kept.items() <= records(out).items() and len(records(out)) == 64
