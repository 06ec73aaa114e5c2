"""The settings that SFT and RL share."""

from dataclasses import dataclass
from typing import Literal

from sage_unsloth.models.lora import LoraSettings
from sage_unsloth.prompts import PROJECT_PROMPT, PromptFormat
from sage_unsloth.runs.settings import DATA, MODEL, OPTIMISER, SAVING, setting


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """How a model is loaded, prompted and optimised, in either stage."""

    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = setting(
        "linear", "learning rate schedule after the peak", OPTIMISER, trainer=True
    )
    optim: str = setting(
        "auto",
        "optimizer, as transformers names it; auto: adamw_8bit on a GPU, else adamw_torch",
        OPTIMISER,
    )
    weight_decay: float = setting(0.01, "weight decay of AdamW", OPTIMISER, low=0, trainer=True)
    max_grad_norm: float = setting(
        1.0, "clip gradients to this norm; 0: never", OPTIMISER, low=0, trainer=True
    )
    load_in_4bit: bool = setting(False, "quantise the frozen weights of the linear layers", MODEL)
    precision: Literal["auto", "bfloat16", "float16"] = setting(
        "auto",
        "format of frozen weights and products; auto: float32 on a CPU, the GPU's own on one; the "
        "adapter is float32",
        MODEL,
    )
    template: Literal["project", "model"] = setting(
        "project", "chat template of the prompts", DATA, option=False
    )
    prompt: PromptFormat = setting(
        PROJECT_PROMPT, "what prompts say, and the tags of an answer", DATA, option=False
    )
    report_to: Literal["none", "tensorboard", "trackio", "wandb"] = setting(
        "none", "tracker, in addition to metrics.jsonl", SAVING, free=True
    )
    lora: LoraSettings = setting(LoraSettings(), "the adapter", MODEL)
