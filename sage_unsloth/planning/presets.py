"""Presets of models and GPUs: sizes, the paper's training of a model, and settings for a GPU.

For other models, a folder or a hub id, the numbers come from config.json.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.planning.architecture import Architecture, read_architecture
from sage_unsloth.runs.files import read_json

PAPER_BETA = 0.05
"""The KL coefficient β of Table 8, the default everywhere."""


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A model and how the paper trains it.

    Attributes:
        name: for `--model`.
        hub_id: or a folder; the embedded model is a folder of this name in
            `embedded.data_folder()`.
        full_finetuning: train every weight; else an adapter (LoRA).
        max_prompt_length, max_completion_length: of RL, tokens.
        sft_max_length: prompt and solution together, tokens.
        prompts_per_step, num_generations: problems in a step of RL, completions for each.
        license: of the weights, as the hub spells it, or None.
        dtype: "bfloat16", or "float32" for the embedded model.

    Raises:
        ValueError: prompt and completion together exceed the model's positions.
    """

    name: str
    hub_id: str
    architecture: Architecture
    full_finetuning: bool = False
    sft_first: bool = False
    max_prompt_length: int = 1024
    max_completion_length: int = 1024
    sft_max_length: int = 2048
    rl_steps: int = 1000
    prompts_per_step: int = 1
    num_generations: int = 8
    license: str | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        longest = self.max_prompt_length + self.max_completion_length
        limit = self.architecture.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"prompt and completion must fit the {limit} positions of {self.name}, got "
                f"{self.max_prompt_length} + {self.max_completion_length} = {longest}"
            )


# Sizes: litgpt's table of these models' config.json (layers, heads, widths, padded vocabulary,
# positions) for the three Qwen models; tied embeddings by the family's rule, tied up to 3B, read
# from Qwen2.5-3B-Instruct's own config.json only. R1-Distill-Qwen-7B starts from Qwen2.5-Math-7B:
# its shape is that model's, its 131,072 positions are from model lists. No config.json of the hub
# was within reach here; the loader reads the real one.
_QWEN_7B: dict[str, Any] = dict(
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=152064,
    tied_embeddings=False,
)
_QWEN_1_5B: dict[str, Any] = dict(
    num_layers=28,
    hidden_size=1536,
    intermediate_size=8960,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=151936,
    tied_embeddings=True,
)
_QWEN_3B: dict[str, Any] = dict(
    num_layers=36,
    hidden_size=2048,
    intermediate_size=11008,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=151936,
    tied_embeddings=True,
)
_QWEN3: dict[str, Any] = dict(
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    max_position_embeddings=40960,
)
_LLAMA_1B: dict[str, Any] = dict(
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    tied_embeddings=True,
    qkv_bias=False,
    max_position_embeddings=131072,
)
# Lengths of the small models: short enough that a T4 samples a step in about a minute.
_SMALL: dict[str, Any] = dict(
    max_prompt_length=512, max_completion_length=512, sft_max_length=1024, rl_steps=200
)
_ARITHMETIC: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=128,
    intermediate_size=320,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=327,
    tied_embeddings=True,
)

# Lengths: Table 7's 2,048, half of it for the prompt as in SFT's own filter; R1-Distill has 8,192
# (2,048 + 6,144). Whether the two instruct models see SFT first is not in the paper; they follow a
# system prompt, so they start with RL.
_MODELS = (
    ModelPreset(
        name="qwen2.5-math-7b",
        hub_id="Qwen/Qwen2.5-Math-7B",
        sft_first=True,
        license="apache-2.0",
        architecture=Architecture(**_QWEN_7B, max_position_embeddings=4096),
    ),
    ModelPreset(
        name="r1-distill-qwen-7b",
        hub_id="deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        license="mit",
        architecture=Architecture(**_QWEN_7B, max_position_embeddings=131072),
        max_prompt_length=2048,
        max_completion_length=6144,
    ),
    ModelPreset(
        name="qwen2.5-math-1.5b-instruct",
        hub_id="Qwen/Qwen2.5-Math-1.5B-Instruct",
        license="apache-2.0",
        architecture=Architecture(**_QWEN_1_5B, max_position_embeddings=4096),
        full_finetuning=True,
    ),
    # The Qwen research licence: not for commercial use.
    ModelPreset(
        name="qwen2.5-3b-instruct",
        hub_id="Qwen/Qwen2.5-3B-Instruct",
        license="qwen-research",
        architecture=Architecture(**_QWEN_3B, max_position_embeddings=32768),
        full_finetuning=True,
    ),
    # Small models that an adapter trains on a free T4 (notebook 06).
    ModelPreset(
        name="qwen3-1.7b",
        hub_id="Qwen/Qwen3-1.7B",
        license="apache-2.0",
        architecture=Architecture(**_QWEN3, hidden_size=2048, intermediate_size=6144),
        **_SMALL,
    ),
    ModelPreset(
        name="qwen3-0.6b",
        hub_id="Qwen/Qwen3-0.6B",
        license="apache-2.0",
        architecture=Architecture(**_QWEN3, hidden_size=1024, intermediate_size=3072),
        **_SMALL,
    ),
    # Unsloth's copy: Meta's own asks for an account that has accepted its licence.
    ModelPreset(
        name="llama-3.2-1b-instruct",
        hub_id="unsloth/Llama-3.2-1B-Instruct",
        license="llama3.2",
        architecture=Architecture(**_LLAMA_1B),
        **_SMALL,
    ),
    ModelPreset(
        name="arithmetic-base",
        hub_id="arithmetic-base",
        sft_first=True,
        license="apache-2.0",
        dtype="float32",
        architecture=Architecture(**_ARITHMETIC, max_position_embeddings=512),
        max_prompt_length=64,
        max_completion_length=48,
        sft_max_length=160,
        rl_steps=100,
        prompts_per_step=8,
    ),
)
MODELS: dict[str, ModelPreset] = {preset.name: preset for preset in _MODELS}
"""Presets of models by name."""


@dataclass(frozen=True, kw_only=True)
class CardPreset:
    """Settings for a GPU of one size; computed, not measured.

    Attributes:
        name: nominal size, GB.
        memory_gib: reported memory of the smallest such GPU, GiB.
        bfloat16: else training runs in float16.
        use_vllm: rollouts by vLLM inside Unsloth; else by transformers.
        gpu_memory_utilization: the share of the GPU for vLLM. Unsloth's standby mode always sets
            these values, by the GPU's size.
        load_in_4bit: quantise the weights of an adapter run.
        micro_batch: sequences in one forward and backward pass; affects only speed and memory.
        recompute_logits: the loss computes its logits twice instead of storing them
            (`UNSLOTH_GRPO_LOGPROB_RECOMPUTE=1`).
        gradient_checkpointing: "unsloth" recomputes each layer and keeps its input in host memory.
    """

    name: str
    memory_gib: float
    cards: str
    bfloat16: bool = True
    use_vllm: bool = True
    gpu_memory_utilization: float | None = None
    load_in_4bit: bool = False
    micro_batch: int = 1
    recompute_logits: bool = True
    gradient_checkpointing: str = "unsloth"


_CARDS = (
    # vLLM 0.11.2 was the last for compute capability 7.5, and none of our pins go with it.
    CardPreset(
        name="16", memory_gib=14.5, cards="T4", bfloat16=False, use_vllm=False, load_in_4bit=True
    ),
    CardPreset(
        name="24", memory_gib=22.0, cards="L4, RTX 3090, RTX 4090", gpu_memory_utilization=0.78
    ),
    CardPreset(
        name="40", memory_gib=39.4, cards="A100 40 GB", gpu_memory_utilization=0.85, micro_batch=4
    ),
    CardPreset(
        name="48",
        memory_gib=44.4,
        cards="L40S, RTX A6000",
        gpu_memory_utilization=0.87,
        micro_batch=4,
    ),
    CardPreset(
        name="80",
        memory_gib=79.1,
        cards="A100 80 GB, H100",
        gpu_memory_utilization=0.87,
        micro_batch=8,
    ),
)
CARDS: dict[str, CardPreset] = {card.name: card for card in _CARDS}
"""Presets of GPUs by name."""


def nearest_card(memory_gib: float) -> CardPreset:
    """The preset of the largest GPU with at most `memory_gib`, or the smallest one."""
    cards = sorted(CARDS.values(), key=lambda card: card.memory_gib)
    return next((card for card in reversed(cards) if card.memory_gib <= memory_gib), cards[0])


def model_preset(name: str | Path) -> ModelPreset:
    """A preset by name, or one made from the config.json of a folder or hub id.

    The latter is an adapter at Table 7's lengths.

    Raises:
        ValueError: an unsupported model family.
        OSError: neither a preset, nor a folder with a config.json, nor a reachable hub id.
    """
    if str(name) in MODELS:
        return MODELS[str(name)]
    for preset in MODELS.values():
        if str(name) == preset.hub_id:
            return preset
    architecture = read_architecture(_config_json(name))
    half = min(1024, architecture.max_position_embeddings // 2)
    return ModelPreset(
        name=Path(str(name)).name,
        hub_id=str(name),
        architecture=architecture,
        max_prompt_length=half,
        max_completion_length=half,
    )


def _config_json(name: str | Path) -> dict[str, Any]:
    """The config.json of a folder or hub id, read without importing transformers before Unsloth."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    file = Path(name) / "config.json"
    try:
        if not file.is_file():
            file = Path(hf_hub_download(str(name), "config.json"))
        return read_json(file)
    except (OSError, HFValidationError) as error:
        why = str(error).partition(". ")[0]
        raise OSError(
            f"a model must be one of {', '.join(MODELS)}, a folder with a config.json, or a hub id "
            f"within reach, got {name!s} ({why}). Check the name, or give the path of a downloaded "
            "model"
        ) from error
