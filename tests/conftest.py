"""A tiny random model under Unsloth's own generated trainer: nothing that matters is replaced by a
stand-in.
"""

import gc
import os
import sys
import tempfile
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault(
    "UNSLOTH_COMPILE_LOCATION",
    os.path.join(tempfile.gettempdir(), f"unsloth_compiled_{os.getpid()}"),
)

# One thread: on tiny tensors more only wait for each other, above all beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from browser import browse  # noqa: F401 (a fixture)

pytest_plugins = ["forked_engine"]  # what runs the tests of the real vLLM

CANARY = "hf_canary0123456789abcdef"
os.environ["HF_TOKEN"] = os.environ["WANDB_API_KEY"] = CANARY

LETTERS = [*"abcdefghijklmnopqrstuvwxyz 0123456789+=?"]


@pytest.fixture(scope="session", autouse=True)
def no_secret_is_written(tmp_path_factory):
    """Every run of the whole session has tokens in its environment: at the end they are in no file
    that it left.
    """
    yield
    found = files_with_canary(tmp_path_factory.getbasetemp())
    assert not found, f"a token was written to {found}"


def files_with_canary(folder):
    """Files below `folder` that hold the token, tensors left out."""
    tensors = (".safetensors", ".pt", ".pth", ".bin", ".png", ".pyc")
    files = [file for file in Path(folder).rglob("*") if file.is_file() and not file.is_symlink()]
    return [f for f in files if f.suffix not in tensors and CANARY.encode() in f.read_bytes()]


@pytest.fixture(scope="session")
def unsloth_module():
    """The module of Unsloth's generated GRPO trainer."""
    from sage_unsloth.trainers.loading import load_unsloth

    module = load_unsloth()
    # Unsloth collects garbage at the start of each training; what has been imported is none.
    gc.collect()
    gc.freeze()
    return module


@pytest.fixture(scope="session")
def smoke_sft(unsloth_module, tmp_path_factory):
    """The embedded model after SFT at smoke size, in its run's folder; nobody writes there."""
    import torch

    from sage_unsloth.models.embedded import BASE_MODEL, data_folder
    from sage_unsloth.problems import arithmetic
    from sage_unsloth.quickstart import smoke_config
    from sage_unsloth.training.sft_stage import sft

    base, folder = data_folder() / BASE_MODEL, tmp_path_factory.mktemp("sft")
    with torch.compiler.set_stance("force_eager"):  # it is made before `eager`
        return sft(smoke_config().sft, base, arithmetic.problems("sft"), folder)


@pytest.fixture(scope="module", autouse=True)
def eager(request):
    """Unsloth compiles a part of its loss even where compilation is off, anew for every kind of
    loss; modules marked `compiled` keep it. Processes that a test starts do not compile either.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch
    import torch._dynamo.config  # reads the variable once, here, so that it is for other processes

    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    compiled = request.config.option.compiled or request.node.get_closest_marker("compiled")
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        yield


@pytest.fixture(scope="session")
def make_tokenizer():
    return build_tokenizer


@pytest.fixture
def make_trainer(unsloth_module, tmp_path):
    """A factory of trainers over a two-layer Qwen2 with LoRA; keyword arguments go to
    GRPOConfig.
    """
    return partial(build_trainer, output_dir=str(tmp_path / "out"))


def build_tokenizer(pad_token="<pad>"):
    """One token a letter; <eos> is 0 and <pad> is 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<eos>", "<pad>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token=pad_token, padding_side="left"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


TRAINER_DEFAULTS = dict(
    per_device_train_batch_size=8,
    num_generations=4,
    max_steps=4,
    max_completion_length=12,
    logging_steps=1,
    report_to="none",
    beta=0.05,
    use_cpu=True,
    learning_rate=5e-3,
    bf16=False,
    fp16=False,
    save_strategy="no",
    use_bias_correction_kl=False,
    seed=3407,
    disable_tqdm=True,
    loss_type="grpo",
    gradient_checkpointing=False,
    max_grad_norm=0,
    # Unsloth finds completions by the pad id, so a policy that samples it would be scored on a
    # different text.
    generation_kwargs={"suppress_tokens": [1]},
)
ROWS = [{"prompt": [{"role": "user", "content": "?" * (i % 5) + f"{i}+{i}="}]} for i in range(32)]


def build_trainer(
    output_dir,
    tokenizer=None,
    lora_noise=0.05,
    reward=None,
    rows=ROWS,
    columns=lambda i: {},
    **settings,
):
    """Unsloth's generated GRPOTrainer; `load_unsloth` must have been called. `columns` gives a row
    further ones by its number.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from sage_unsloth.trainers.loading import prepare_for_cpu

    trainer = GRPOTrainer(
        model=prepare_for_cpu(tiny_model(lora_noise)),
        processing_class=tokenizer or build_tokenizer(),
        reward_funcs=reward if isinstance(reward, list) else [reward or length_reward],
        args=GRPOConfig(**({"output_dir": output_dir} | TRAINER_DEFAULTS | settings)),
        train_dataset=Dataset.from_list([row | columns(i) for i, row in enumerate(rows)]),
    )
    # The oracle scores with a copy that neither Unsloth nor accelerate has touched.
    trainer.oracle_model = tiny_model(lora_noise).double()
    return trainer


def tiny_model(lora_noise):
    """Qwen2, two layers of width 48, float32, with LoRA whose B is noise: a policy that differs
    from its reference.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(LETTERS) + 2,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(Qwen2ForCausalLM(config), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=lora_noise)
    return model


def length_reward(completions, **_):
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


@pytest.fixture(scope="session")
def exact_first_kl():
    """How near 0 the first step's KL must be: exactly 0 where scoring and gradient pass run the
    same kernels.
    """
    import importlib.metadata

    from packaging.version import Version

    return 0.0 if Version(importlib.metadata.version("unsloth")) <= Version("2026.10.7") else 1e-7


# The longest files first, so that no worker begins one when the others are done.
RESEARCH = Path(__file__).parent / "research"
LONGEST = (
    "test_notebooks.py",
    "test_compiled.py",
    "test_own_trl.py",
    "test_quickstart.py",
    "test_next_commands.py",
    "test_killed_twice.py",
    "test_first_user.py",
    "test_trl_parity.py",
    "test_distributed.py",
    "test_backends.py",
    "test_moved_run.py",
    "test_wheel.py",
    "test_patch.py",
    "test_compositions.py",
    "test_patch_estimators.py",
    "test_numbers.py",
    "test_evidence.py",
    "test_kills.py",
    "test_teacher.py",
    "test_stages.py",
    "test_algorithms.py",
    "test_program_attacks.py",
    "test_rlvr.py",
    "test_devices.py",
    "test_own_task.py",
    "test_held_out.py",
    "test_scoring.py",
    "test_soak.py",
)


def pairs(first, second):
    """Every pair of two tables' values, for `parametrize`: each of the first with one of the second
    in turn, the others with the long tests.
    """
    return [
        pytest.param(a, b, id=f"{x}-{y}", marks=[pytest.mark.long] * (j != i % len(second)))
        for i, (x, a) in enumerate(first.items())
        for j, (y, b) in enumerate(second.items())
    ]


@pytest.fixture(autouse=True)
def modules_of_a_test_end_with_it():
    """Two tests may write a module of one name, each into a folder of its own."""
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if "/pytest-of-" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def pytest_addoption(parser):
    parser.addoption(
        "--compiled", action="store_true", help="every test with Unsloth's compilation on"
    )


def pytest_configure(config):
    if config.option.compiled:
        os.environ["UNSLOTH_COMPILE_DISABLE"] = "0"
        os.environ["TORCH_COMPILE_DISABLE"] = "0"
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist is there
        config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path, config):
    """`-m smoke` alone does not import what has no such test."""
    if config.option.markexpr == "smoke" and collection_path.name.startswith("test_"):
        return "mark.smoke" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out by markers
def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        if item.path.parent == RESEARCH:  # whoever changes the package does not wait for these
            item.add_marker(pytest.mark.long)
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
