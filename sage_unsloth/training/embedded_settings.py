"""The settings of both stages and of the evaluation on the embedded model: minutes on a CPU."""

from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sft_stage import SftConfig

SFT = SftConfig(max_steps=40, batch_size=16, learning_rate=5e-4, max_length=160)
RLVR = RlvrConfig(
    max_steps=100,
    prompts_per_step=8,
    max_completion_length=48,
    max_prompt_length=64,
    learning_rate=2e-3,
    min_p=0.0,
    preflight_prompts=0,
    save_steps=20,
)
SAMPLING = SamplingConfig(
    num_samples=64, temperature=1.0, min_p=0.0, max_completion_length=48, batch_size=512
)
