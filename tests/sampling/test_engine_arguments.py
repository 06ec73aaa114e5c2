"""Format and arguments of an engine: as asked for, recorded, and refused where they cannot be."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file
from table_engine import CONFIG, ROWS, Table

from sage_unsloth.evaluation import evaluator
from sage_unsloth.evaluation.complete_sets import identities_of
from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.models.dtypes import chosen_dtype, own_dtype
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.runs.settings import parse_settings
from sage_unsloth.sampling.engine_arguments import (
    check_temperature,
    engine_arguments,
    lora_arguments,
    not_free,
    parse_arguments,
)
from sage_unsloth.sampling.engine_errors import EngineError, engine_errors
from sage_unsloth.sampling.record_files import read_settings
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training.rlvr_config import RlvrConfig

BASE = data_folder() / BASE_MODEL


def test_arguments_become_values():
    texts = ["enforce_eager=true", "gpu_memory_utilization=.5", "max_num_seqs=64"]
    texts += ["kv_cache_dtype=fp8", "compilation_config=None", "stop=[1, 2]"]
    assert parse_arguments(texts) == {
        "enforce_eager": True,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 64,
        "kv_cache_dtype": "fp8",
        "compilation_config": None,
        "stop": [1, 2],
    }
    assert not_free(parse_arguments(texts[:4])) == {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["enforce_eager"], "must be NAME=VALUE, .* got 'enforce_eager'"),
        (["--x=1"], "must be NAME=VALUE"),
        (["dtype=float32"], "engine's dtype follows from --dtype"),
        (["seed=1"], "follows from --seed"),
        (["max_num_seqs=1", "max_num_seqs=2"], "given once, got max_num_seqs twice"),
    ],
)
def test_arguments_that_cannot_be_are_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(texts)
    with pytest.raises(ValueError, match=message):
        RlvrConfig(engine_arguments=tuple(texts))


def test_a_run_takes_them_by_set():
    given = parse_settings(["engine_arguments=enforce_eager=true,max_num_seqs=64"], RlvrConfig())
    assert RlvrConfig(**given).engine_arguments == ("enforce_eager=true", "max_num_seqs=64")


def test_an_engine_on_a_processor_is_eager_and_takes_no_more_than_a_quarter():
    import psutil

    arguments = engine_arguments((), 300, "float32")
    assert arguments["dtype"] == "float32" and arguments["max_model_len"] == 300
    assert arguments["enforce_eager"] and not arguments["enable_chunked_prefill"]
    assert 0 < arguments["kv_cache_memory_bytes"] <= psutil.virtual_memory().total / 4


@pytest.mark.parametrize(("rank", "served"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32)])
def test_an_adapter_is_served_with_the_next_rank_that_vllm_knows(rank, served):
    assert lora_arguments([1, rank])["max_lora_rank"] == served


def model(folder, config, tensors=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_models_own_format(tmp_path):
    half = {"steps": np.ones(1, np.int64), "w": np.ones(2, np.float16)}
    cases = {
        "named": ({"dtype": "bfloat16"}, None, "bfloat16"),
        "old": ({"torch_dtype": "torch.float16"}, None, "float16"),
        "text": ({"text_config": {"dtype": "bfloat16"}}, None, "bfloat16"),
        "weights": ({}, half, "float16"),
        "nothing": ({}, None, "float32"),
        "eight": ({"dtype": "float8_e4m3fn"}, None, "float32"),
    }
    for name, (config, tensors, expected) in cases.items():
        assert own_dtype(model(tmp_path / name, config, tensors)) == expected, name
    assert own_dtype(BASE) == "float32"
    assert chosen_dtype("bfloat16", BASE) == "bfloat16"
    with pytest.raises(ValueError, match="auto, float32, bfloat16, float16, got 'fp8'"):
        chosen_dtype("fp8", BASE)


def test_the_phase_that_failed_is_named():
    for phase, said in (
        ("import", "must be imported, but failed: MemoryError: full. .*sage_unsloth doctor"),
        ("start", r"must start, but failed: MemoryError: full. .* \(--engine-set gpu_memory"),
    ):
        with (
            pytest.raises(EngineError, match=f"the engine of m {said}"),
            engine_errors("m", phase),
        ):
            raise MemoryError("full")
    with pytest.raises(ValueError, match=r"^ours$"), engine_errors("m", "start"):
        raise ValueError("ours")
    with (
        pytest.raises(EngineError, match="must start, but failed: ValueError: theirs"),
        engine_errors("m", "start", refusals=False),
    ):
        raise ValueError("theirs")


class Started(Table):
    arguments = {"gpu_memory_utilization": 0.5, "kv_cache_dtype": "fp8"}


def test_what_an_engine_was_started_with_is_noted(tmp_path):
    path = tmp_path / "m.jsonl"
    sample_and_grade(CONFIG, Started(), ROWS, path, model="m", benchmark="b")
    recorded = read_settings(path)
    assert recorded["engine_arguments"] == Started.arguments
    assert "engine_arguments" not in recorded["settings"], "the caller says which of them matter"
    other = tmp_path / "other.jsonl"
    sample_and_grade(CONFIG, Table(), ROWS, other, model="m", benchmark="b")
    assert "engine_arguments" not in read_settings(other)


def identities(dtype="auto", arguments=None):
    spec = ModelSpec(name="m", path=str(BASE), template="project")
    (found,) = identities_of([spec], dtype, arguments or {})
    return found


def test_the_format_tells_a_set_from_others_and_older_sets_resume(tmp_path):
    path = tmp_path / "m.jsonl"
    own = identities()
    assert own["dtype"] == "float32" and "engine_arguments" not in own
    engine = Table()
    engine.name = "transformers"

    def draw(identity):
        sample_and_grade(CONFIG, engine, ROWS, path, model="m", benchmark="b", identity=identity)

    draw(own)
    with pytest.raises(ValueError, match='dtype was "float32" and is "bfloat16"'):
        draw(identities("bfloat16"))
    told = identities(arguments={"kv_cache_dtype": "fp8", "max_num_seqs": 3})
    with pytest.raises(ValueError, match=r'kv_cache_dtype was absent and is "fp8"'):
        draw(told)
    draw(identities(arguments={"max_num_seqs": 3}))


def test_a_temperature_that_vllm_does_not_take_is_refused_at_once(tmp_path):
    hot = replace(CONFIG, temperature=2.5)
    check_temperature("transformers", 2.5)
    with pytest.raises(ValueError, match=r"temperature must be <= 2 with vLLM.* got 2.5. Lower"):
        evaluator.sample_models([], [], tmp_path, hot, engine="vllm")


def test_arguments_of_vllm_are_for_vllm(tmp_path):
    with pytest.raises(ValueError, match="are for vLLM, got max_num_seqs with engine transformers"):
        evaluator.evaluate_models(
            [ModelSpec(name="m", path=str(BASE))],
            [evaluator.parse_benchmark("arithmetic", problems=2)],
            tmp_path,
            CONFIG,
            engine_arguments={"max_num_seqs": 3},
        )
