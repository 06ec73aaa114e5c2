"""The settings of stage 2 (Table 8)."""

from dataclasses import dataclass, field

from sage_unsloth.methods.advantage_rules import GRPO, check_rule
from sage_unsloth.methods.choices import check_choices
from sage_unsloth.methods.rehearsal import rehearsal_rule
from sage_unsloth.methods.token_rules import NONE, check_token_rule
from sage_unsloth.models.loading import LoraSettings
from sage_unsloth.objective.loss import LOSS_TYPES
from sage_unsloth.patch.backends import BACKENDS
from sage_unsloth.planning.presets import PAPER_BETA
from sage_unsloth.prompts import PROJECT_PROMPT, TEMPLATES, PromptFormat
from sage_unsloth.sampling.engine_arguments import parse_arguments
from sage_unsloth.sampling.engine_choice import ROLLOUTS
from sage_unsloth.training.number_formats import check_precision

REFERENCES = ("sft", "base")
SCALE_REWARDS = ("group", "batch", "none")
BEST_BY = ("pass@1", "pass@k")
UNUSED_WITHOUT = (
    ("rehearsal", "rehearsal_coef", 0, "rehearsal_coef=0.1"),
    ("eval_samples", "eval_steps", 0, "eval_steps=50"),
    ("eval_rows", "eval_steps", 0, "eval_steps=50"),
    ("best_by", "eval_steps", 0, "eval_steps=50"),
)
"""Settings that have no effect while another has this value, and what to set instead."""


@dataclass(frozen=True, kw_only=True)
class RlvrConfig:
    """Stage 2 (Table 8); the values are the paper's where it gives one.

    Attributes:
        max_steps: optimizer steps.
        prompts_per_step: different problems in a step, over all processes.
        num_generations: completions sampled for each problem.
        micro_batch_size: completions that go through the loss together in one process; None takes
            all that a step gives it. Smaller needs less memory.
        max_completion_length: tokens.
        max_prompt_length: tokens; longer prompts are refused.
        learning_rate: peak; linear decay after `warmup_ratio` of the steps.
        weight_decay: of AdamW.
        beta: KL coefficient β.
        kl_estimator: the KL penalty, one of `penalties.KL_ESTIMATORS`; "k3" is the paper's.
        credit: "token", the paper's, or "sequence": each token is credited with the guide and the
            KL of those after it, so that the update follows Eq. 6 (`credit.sequence_credit`). All
            completions of a step then go through the loss together, and `micro_batch_size` says how
            many of them at a time have their logits computed.
        kl_in: "loss", the paper's, or "reward": β times a completion's log-ratio to π_ref is taken
            from its reward, and the loss has no KL term.
        teacher: for a guide that reads one: an adapter's folder (on the same base), or a model's
            folder or hub id (with the same tokenizer); empty for none. A model takes its own
            memory, which the plan does not count.
        reference: what π_ref is: "sft", the model that RL starts from, or "base", the model below
            the adapter that it starts from.
        loss_type: how token losses are reduced ("grpo", "bnpo", "dr_grpo", "dapo").
        scale_rewards: what the advantages r − mean(r) are divided by: the standard deviation of the
            prompt's rewards ("group", as in the paper), of the step's ("batch"), or nothing
            ("none").
        advantages: what makes advantages of a group's rewards: "grpo", the trainer's own, another
            rule of `methods.advantage_rules` with its settings ("pkpo,k=4"), or
            "module:function" for one of your own; with another than "grpo", `scale_rewards` has no
            effect.
        token_advantages: what changes the advantages of single tokens: "none", a rule of
            `methods.token_rules` with its settings ("clip-cov,share=0.001"), or "module:function"
            for one of your own.
        entropy_coef: weight c of an entropy bonus: the loss is lowered by c times the mean entropy
            of the policy's tokens, nats (TRL's `entropy_coef`); 0 for none.
        rehearsal_coef: weight of a divergence from π_ref on right completions that π_ref drew of
            the training rows before the first step (`methods.rehearsal`); 0 for none.
        rehearsal: which divergence, "forward-kl" or "js", with its settings
            ("forward-kl,problems=512,samples=16,batch=4,solved=1").
        epsilon, epsilon_high: clip range of the importance ratio.
        max_resamples: times that a rollout batch's groups without a signal are sampled again for
            other prompts (`dynamic_sampling`, with the cost of each); 0 never does.
        top_entropy_quantile: the policy term is kept at this share of the tokens, those before
            which the policy's entropy is highest, and the KL term at every token (TRL's entropy
            mask); 1 masks nothing.
        temperature, top_p, min_p: sampling; top-k is off.
        backend: "unsloth", or "trl": TRL's own trainer, without Unsloth (`docs/several_gpus.md`).
        rollouts: "vllm", "transformers", or "auto": vLLM on a GPU that it runs on; with
            backend="trl" also "server", and "auto" is transformers.
        vllm_server: address of the server (`trl vllm-serve`) that draws rollouts="server".
        recompute_logits: the loss computes its logits a second time in the backward pass instead of
            keeping them: less memory, the same result.
        gpu_memory_utilization: share of the card's memory for vLLM, weights included.
        engine_arguments: further arguments of vLLM's engine, "NAME=VALUE" each, such as
            "enforce_eager=true"; on a GPU those that Unsloth's loader passes on.
        vllm_importance_sampling_correction: weigh each token by trainer's over vLLM's probability,
            at most 2 (as TRL 0.23, which the authors ran); vLLM's is that after min-p, so the
            weight is the share of probability that min-p kept.
        full_finetuning: train every weight instead of an adapter.
        load_in_4bit: quantise the frozen weights of the linear layers.
        precision: format of the frozen weights and of the products, one of
            `number_formats.PRECISIONS`; "auto" is float32 on a CPU and what the card computes in on
            a GPU. The adapter is trained in float32 in any case.
        template: whose chat template makes the prompts, one of `prompts.TEMPLATES`.
        prompt: what the prompts say, and the tags by which an answer is found.
        preflight_prompts: prompts sampled before training to see whether there is anything to learn
            from; 0 skips it.
        log_entropy: log the policy's entropy also without a guide that needs it, so that runs can
            be compared; in full fine-tuning on Unsloth 2026.10.7 this costs time.
        save_steps: optimizer steps between checkpoints.
        sample_steps: optimizer steps between samples of completions in `completions.jsonl`; 0
            writes none.
        eval_steps: optimizer steps between evaluations on held-out rows, beside those before the
            first and after the last step; 0 makes none.
        eval_samples: completions of each held-out row, sampled as in training.
        eval_rows: rows held out of those to train on, with every other row of the same problem;
            refused where held-out rows are given, all of which are evaluated.
        best_by: "pass@1" or "pass@k", at k = eval_samples: by which of them `best/` is chosen.
        patience: training ends after so many evaluations in a row without a better one; 0 never.
        report_to: "none", "tensorboard", "trackio" or "wandb"; `metrics.jsonl` is written in any
            case.
        grade_seconds: time limit for grading one answer.
        reward_seconds: time limit of one call of a reward function of your own.
        lora: the adapter.
        seed: of adapter, data order, the guide's noise, and of rollouts by transformers; vLLM's
            stream has a seed of its own, which Unsloth sets to 0 at every start.
    """

    max_steps: int = 1000
    prompts_per_step: int = 1
    num_generations: int = 8
    micro_batch_size: int | None = None
    max_completion_length: int = 1024
    max_prompt_length: int = 1024
    learning_rate: float = 5e-6
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    beta: float = PAPER_BETA
    kl_estimator: str = "k3"
    credit: str = "token"
    kl_in: str = "loss"
    reference: str = "sft"
    teacher: str = ""
    loss_type: str = "grpo"
    scale_rewards: str = "group"
    advantages: str = GRPO
    token_advantages: str = NONE
    entropy_coef: float = 0.0
    rehearsal_coef: float = 0.0
    rehearsal: str = "forward-kl"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    max_resamples: int = 0
    top_entropy_quantile: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.01
    backend: str = "unsloth"
    rollouts: str = "auto"
    vllm_server: str = "http://127.0.0.1:8000"
    recompute_logits: bool = False
    gpu_memory_utilization: float = 0.5
    engine_arguments: tuple[str, ...] = ()
    vllm_importance_sampling_correction: bool = True
    full_finetuning: bool = False
    load_in_4bit: bool = False
    precision: str = "auto"
    template: str = "project"
    prompt: PromptFormat = PROJECT_PROMPT
    preflight_prompts: int = 32
    log_entropy: bool = True
    save_steps: int = 50
    sample_steps: int = 25
    eval_steps: int = 0
    eval_samples: int = 4
    eval_rows: int = 64
    best_by: str = "pass@1"
    patience: int = 0
    report_to: str = "none"
    grade_seconds: float = 5.0
    reward_seconds: float = 60.0
    lora: LoraSettings = field(default_factory=LoraSettings)
    seed: int = 3407

    def __post_init__(self) -> None:
        self._check_ranges()
        for name, allowed in (
            ("loss_type", LOSS_TYPES),
            ("backend", BACKENDS),
            ("rollouts", (*ROLLOUTS, "server")),
            ("scale_rewards", SCALE_REWARDS),
            ("reference", REFERENCES),
            ("template", TEMPLATES),
            ("best_by", BEST_BY),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}"
                )
        check_precision(self.precision, full_finetuning=self.full_finetuning, backend=self.backend)
        check_choices(
            guide=None,
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            credit=self.credit,
            kl_in=self.kl_in,
        )
        any_reward = self.kl_in == "reward"
        check_rule(self.advantages, self.num_generations, any_reward=any_reward)
        check_token_rule(self.token_advantages)
        rehearsal_rule(self.rehearsal)
        parse_arguments(self.engine_arguments)
        self._check_used()
        if self.micro_batch_size is not None and (
            self.micro_batch_size < 1 or self.completions_per_step % self.micro_batch_size
        ):
            raise ValueError(
                f"micro_batch_size must divide the completions of a step ({self.prompts_per_step} "
                f"prompts x {self.num_generations} = {self.completions_per_step}); got "
                f"{self.micro_batch_size}"
            )

    def _check_ranges(self) -> None:
        for name in (
            "max_steps",
            "prompts_per_step",
            "max_completion_length",
            "max_prompt_length",
            "learning_rate",
            "temperature",
            "save_steps",
            "eval_samples",
            "eval_rows",
            "grade_seconds",
            "reward_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0; got {getattr(self, name)}")
        for name in (
            "beta",
            "entropy_coef",
            "rehearsal_coef",
            "preflight_prompts",
            "sample_steps",
            "weight_decay",
            "max_resamples",
            "eval_steps",
            "patience",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0; got {getattr(self, name)}")
        for name, low, high in (
            ("epsilon", 0, 1),
            ("epsilon_high", 0, 10),
            ("min_p", 0, 1),
            ("top_p", 0, 1),
            ("warmup_ratio", 0, 1),
            ("gpu_memory_utilization", 0, 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be in [{low}, {high}]; got {getattr(self, name)}")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ValueError(
                "top_entropy_quantile must be in (0, 1] because it is a share of the tokens, and 1 "
                f"is all of them; got {self.top_entropy_quantile}"
            )
        if self.patience and not self.eval_steps:
            raise ValueError(
                "patience counts evaluations, of which eval_steps=0 makes none; got "
                f"patience={self.patience}; set eval_steps=50, say, or patience=0"
            )
        if self.num_generations < 2:
            raise ValueError(
                "num_generations must be >= 2 because a completion's advantage is relative to its "
                f"group; got {self.num_generations}"
            )

    def _check_used(self) -> None:
        """Raise where a setting was changed that nothing reads."""
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
                    f"{name}={getattr(self, name)!r} has no effect with {reason}; set {instead}, "
                    f"say, or leave {name} out"
                )

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations
