"""Settings of both stages and of the evaluation for the embedded model: minutes on a CPU."""

from sage_unsloth.models.embedded import BASE_MODEL
from sage_unsloth.planning.presets import MODELS
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig

_PRESET = MODELS[BASE_MODEL]
SFT = SftConfig(max_steps=40, batch_size=16, learning_rate=5e-4, max_length=_PRESET.sft_max_length)
RLVR = RlvrConfig(
    max_steps=_PRESET.rl_steps,
    prompts_per_step=_PRESET.prompts_per_step,
    num_generations=_PRESET.num_generations,
    max_completion_length=_PRESET.max_completion_length,
    max_prompt_length=_PRESET.max_prompt_length,
    learning_rate=2e-3,
    min_p=0.0,
    preflight_prompts=0,
    save_steps=20,
)
SAMPLING = SamplingConfig(
    num_samples=64, temperature=1.0, min_p=0.0, max_completion_length=48, batch_size=512
)
