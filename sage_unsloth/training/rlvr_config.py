"""The settings of stage 2 (Table 8)."""

from dataclasses import dataclass
from typing import Literal

from sage_unsloth.planning.presets import PAPER_BETA
from sage_unsloth.runs.settings import (
    DATA,
    EVALUATION,
    MODEL,
    OBJECTIVE,
    OPTIMISER,
    ROLLOUT_GROUP,
    SAVING,
    check_settings,
    document_settings,
    setting,
)
from sage_unsloth.training.stage_config import StageConfig

UNUSED_WITHOUT = (
    ("rehearsal", "rehearsal_coef", 0, "rehearsal_coef=0.1"),
    ("eval_samples", "eval_steps", 0, "eval_steps=50"),
    ("eval_rows", "eval_steps", 0, "eval_steps=50"),
    ("best_by", "eval_steps", 0, "eval_steps=50"),
    ("patience", "eval_steps", 0, "eval_steps=50"),
    ("coverage_budget", "eval_steps", 0, "eval_steps=50"),
)
"""Settings that have no effect while another has this value, and what to set instead."""


@document_settings
@dataclass(frozen=True, kw_only=True)
class RlvrConfig(StageConfig):
    """Stage 2 (Table 8); the values are the paper's where it gives one."""

    max_steps: int = setting(1000, "optimizer steps", OPTIMISER, above=0, trainer=True)
    prompts_per_step: int = setting(
        1, "different problems in a step, over all processes", ROLLOUT_GROUP, above=0
    )
    num_generations: int = setting(
        8,
        "completions sampled for each problem",
        ROLLOUT_GROUP,
        low=2,
        why="because a completion's advantage is relative to its group",
        trainer=True,
    )
    micro_batch_size: int | None = setting(
        None,
        "completions in one pass through the loss, in each process; none: all of a step; fewer "
        "need less memory",
        OPTIMISER,
    )
    max_completion_length: int = setting(
        1024, "tokens of a completion", ROLLOUT_GROUP, above=0, trainer=True
    )
    max_prompt_length: int = setting(
        1024, "tokens of a prompt; rows with longer ones are skipped", DATA, above=0
    )
    learning_rate: float = setting(5e-6, "peak learning rate", OPTIMISER, above=0, trainer=True)
    warmup_ratio: float = setting(0.1, "share of the steps for warm-up", OPTIMISER, low=0, high=1)
    num_iterations: int = setting(
        1, "training passes over each batch of completions", OPTIMISER, low=1, trainer=True
    )
    beta: float = setting(PAPER_BETA, "KL coefficient β", OBJECTIVE, low=0, trainer=True)
    kl_estimator: Literal["k3", "k3-is", "k2", "forward-kl", "forward-kl-naive"] = setting(
        "k3", "KL penalty; k3 is the paper's", OBJECTIVE
    )
    credit: Literal["token", "sequence"] = setting(
        "token",
        "sequence: each token is credited with guide and KL of later tokens, as in Eq. 6",
        OBJECTIVE,
    )
    kl_in: Literal["loss", "reward"] = setting(
        "loss",
        "place of the KL; reward: β times a completion's log-ratio to π_ref is subtracted from its"
        " reward",
        OBJECTIVE,
    )
    teacher: str = setting(
        "",
        "adapter or model (folder or hub id, same tokenizer) for a guide that needs one; its "
        "memory is not in the plan",
        OBJECTIVE,
    )
    reference: Literal["sft", "base"] = setting(
        "sft",
        "π_ref: the model that RL starts from, or the model below the adapter that it starts from",
        OBJECTIVE,
    )
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = setting(
        "grpo", "how token losses are reduced", OBJECTIVE, trainer=True
    )
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group",
        "divide advantages by the standard deviation of the rewards of the prompt, of the step, or"
        " not",
        OBJECTIVE,
        trainer=True,
    )
    advantages: str = setting(
        "grpo",
        "rule from a group's rewards to advantages: grpo, another one with its settings "
        "(pkpo,k=4), or your module:function",
        OBJECTIVE,
    )
    token_advantages: str = setting(
        "none",
        "rule for the advantages of single tokens (clip-cov,share=0.001), or your module:function",
        OBJECTIVE,
    )
    entropy_coef: float = setting(
        0.0, "weight of an entropy bonus, per nat of the mean entropy", OBJECTIVE, low=0,
        trainer=True,
    )  # fmt: skip
    balance_by: str = setting(
        "",
        "column, such as family: rows are repeated until each of its values has equally many; "
        "pass_rate (share of correct samples) repeats a row 1/p times instead",
        DATA,
    )
    rehearsal_coef: float = setting(
        0.0,
        "weight of a divergence from π_ref on correct completions that π_ref sampled before "
        "training",
        OBJECTIVE,
        low=0,
    )
    rehearsal: str = setting(
        "forward-kl",
        "which divergence, forward-kl, js or sft (the cross-entropy), with its settings "
        "(forward-kl,problems=512,samples=16,batch=4,solved=1)",
        OBJECTIVE,
    )
    epsilon: float = setting(
        0.2, "clip of the importance ratio, below 1", OBJECTIVE, low=0, high=1, trainer=True
    )
    epsilon_high: float = setting(
        0.2, "clip of the importance ratio, above 1", OBJECTIVE, low=0, high=10, trainer=True
    )
    max_resamples: int = setting(
        0, "attempts to replace groups without a signal by other prompts", ROLLOUT_GROUP, low=0
    )
    top_entropy_quantile: float = setting(
        1.0,
        "share of tokens, those of highest entropy, with a policy term",
        OBJECTIVE,
        above=0,
        high=1,
        why="because it is a share of the tokens, and 1 is all of them",
        trainer=True,
    )
    temperature: float = setting(
        1.0, "sampling temperature; top-k is off", ROLLOUT_GROUP, above=0, trainer=True
    )
    top_p: float = setting(
        1.0, "sample from the most probable tokens with this total probability", ROLLOUT_GROUP,
        low=0, high=1, trainer=True,
    )  # fmt: skip
    min_p: float = setting(
        0.01, "exclude tokens below this share of the largest probability", ROLLOUT_GROUP,
        low=0, high=1,
    )  # fmt: skip
    backend: Literal["unsloth", "trl"] = setting(
        "unsloth",
        "trainer: Unsloth's on one GPU, or TRL's own, which accelerate can run on many",
        MODEL,
    )
    rollouts: Literal["auto", "vllm", "transformers", "server"] = setting(
        "auto",
        "engine; auto: vllm on a GPU that it supports; server is for --backend trl",
        ROLLOUT_GROUP,
    )
    vllm_server: str = setting(
        "http://127.0.0.1:8000",
        "address of the server (trl vllm-serve) of --rollouts server",
        ROLLOUT_GROUP,
        free=True,
    )
    recompute_logits: bool = setting(
        False,
        "compute logits again in the backward pass: less memory, the same result",
        MODEL,
        free=True,
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "share of the GPU's memory for vLLM, weights included",
        ROLLOUT_GROUP,
        low=0,
        high=1,
        free=True,
    )
    engine_arguments: tuple[str, ...] = setting(
        (), "further arguments of vLLM's engine, NAME=VALUE with commas between", ROLLOUT_GROUP
    )
    vllm_importance_sampling_correction: bool = setting(
        True,
        "weight each token by the ratio of the trainer's to vLLM's probability, at most 2",
        ROLLOUT_GROUP,
        trainer=True,
    )
    full_finetuning: bool = setting(False, "train every weight instead of an adapter", MODEL)
    preflight_prompts: int = setting(
        32,
        "prompts to sample before training, to check for a signal; 0: none",
        EVALUATION,
        low=0,
        free=True,
    )
    log_entropy: bool = setting(
        True,
        "log the policy's entropy even if no guide needs it; costs time in full fine-tuning",
        EVALUATION,
    )
    save_steps: int = setting(
        50, "optimizer steps between checkpoints", SAVING, above=0, free=True, trainer=True
    )
    sample_steps: int = setting(
        25,
        "optimizer steps between samples of completions in completions.jsonl; 0: none",
        SAVING,
        low=0,
        free=True,
    )
    eval_steps: int = setting(
        0,
        "optimizer steps between evaluations on held-out rows; 0: none",
        EVALUATION,
        low=0,
    )
    eval_samples: int = setting(
        4, "completions of each held-out row, sampled as in training", EVALUATION, above=0
    )
    eval_rows: int = setting(
        64, "training rows to hold out, with all other rows of their problems", EVALUATION,
        above=0,
    )  # fmt: skip
    best_by: Literal["pass@1", "pass@k"] = setting(
        "pass@1", "metric that chooses best/; k is eval_samples", EVALUATION
    )
    patience: int = setting(
        0, "training ends after this many evaluations without improvement; 0: never", EVALUATION,
        low=0,
    )  # fmt: skip
    coverage_budget: float = setting(
        0.0,
        "allowed loss of pass@k, k = eval_samples, on held-out rows: training ends after two "
        "evaluations in a row beyond it, if the last interval is below 0, and best/ is within it; "
        "0: no limit",
        EVALUATION,
        low=0,
        high=1,
    )
    grade_seconds: float = setting(
        5.0, "time limit for grading one answer, seconds", EVALUATION, above=0, free=True
    )
    reward_seconds: float = setting(
        60.0, "time limit of one call of your reward function, seconds", EVALUATION,
        above=0, free=True,
    )  # fmt: skip
    seed: int = setting(
        3407,
        "seed of adapter, data order, the guide's noise, and rollouts by transformers (vLLM has "
        "its own, which Unsloth sets to 0)",
        OPTIMISER,
        trainer=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_objective()
        self._check_used()
        if self.micro_batch_size is not None and (
            self.micro_batch_size < 1 or self.completions_per_step % self.micro_batch_size
        ):
            raise ValueError(
                f"micro_batch_size must divide the completions of a step ({self.prompts_per_step} "
                f"prompts x {self.num_generations} = {self.completions_per_step}), got "
                f"{self.micro_batch_size}"
            )

    def _check_objective(self) -> None:
        """Raises for parts of the objective that contradict each other, or an unknown rule."""
        # Imported late: they load PyTorch, which --help does without.
        from sage_unsloth.methods.advantage_rules import check_rule
        from sage_unsloth.methods.choices import check_choices
        from sage_unsloth.methods.rehearsal import rehearsal_rule
        from sage_unsloth.methods.token_rules import check_token_rule
        from sage_unsloth.sampling.engine_arguments import parse_arguments
        from sage_unsloth.training.number_formats import check_precision

        check_precision(self.precision, full_finetuning=self.full_finetuning, backend=self.backend)
        check_choices(
            guide=None,
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            credit=self.credit,
            kl_in=self.kl_in,
        )
        # With the KL in the reward, rewards are no longer 0 or 1.
        any_reward = self.kl_in == "reward"
        check_rule(self.advantages, self.num_generations, any_reward=any_reward)
        check_token_rule(self.token_advantages, self.num_iterations)
        rehearsal_rule(self.rehearsal)
        parse_arguments(self.engine_arguments)

    def _check_used(self) -> None:
        """Raises for a changed setting that nothing reads."""
        unused = [
            (name, f"{other}={value!r}", instead)
            for name, other, value, instead in UNUSED_WITHOUT
            if getattr(self, other) == value
        ]
        if self.rollouts != "server":
            unused.append(("vllm_server", f"rollouts={self.rollouts!r}", "rollouts=server"))
        for name, reason, instead in unused:
            if getattr(self, name) != getattr(RlvrConfig, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with {reason}. Set {instead}, "
                    f"say, or leave {name} out"
                )

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations
