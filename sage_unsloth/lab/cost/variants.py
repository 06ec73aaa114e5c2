"""What the benchmark runs: losses side by side on one trainer, over a model of any hidden size and
vocabulary with random weights.

A loss is measured where training meets it: `compute_loss` of Unsloth's generated trainer, on a
batch that stands in the place of rollouts, with a model of one layer, so that the output head
dominates as it does in the loss of a large one. Weights are random, since no figure depends on
their values.

Shapes: B completions, P prompt tokens, T completion tokens, V vocabulary.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.models.embedded import data_folder
from sage_unsloth.models.loading import LoraSettings, load_policy
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.objective.loss import grpo_loss
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.patch.rollout_batch import GROUPS, PREFIX
from sage_unsloth.prompts import prompt_messages
from sage_unsloth.training.algorithms import ALGORITHMS, Algorithm, get_algorithm

BASELINE, MATERIALISED = "grpo", "materialised"
PROMPT_TOKENS = 16
EMBEDDED = "arithmetic-base"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One loss of the comparison.

    Attributes:
        name: of an algorithm, or "materialised".
        guide: shapes the anchor; None is q = 1.
        kl_estimator: the KL penalty.
        credit: "token" or "sequence".
        log_entropy: entropies are asked for whatever the guide, as the training stages do.
        materialised: the whole (B, T, V) logits and their entropy in plain torch instead of
            Unsloth's loss.
    """

    name: str
    guide: Guide | None = None
    kl_estimator: str = "k3"
    credit: str = "token"
    log_entropy: bool = False
    materialised: bool = False

    @contextmanager
    def on(self, trainer: Any, guide_seconds: list[float] | None = None) -> Iterator[None]:
        """Within this context `trainer.compute_loss` is this variant's.

        Args:
            guide_seconds: gets the time of each call of the guide.
        """
        trainer.args.use_bias_correction_kl = self.kl_estimator == "k3-is"
        if self.materialised:
            trainer.compute_loss = lambda model, inputs, **_: materialised_loss(
                trainer, model, inputs, self.guide
            )
            try:
                yield
            finally:
                del trainer.compute_loss
            return
        guide = self.guide
        if guide is not None and guide_seconds is not None:
            guide = _timed(guide, guide_seconds)
        options = dict(credit=self.credit, log_entropy=self.log_entropy)
        with guided_kl(trainer, guide, kl_estimator=self.kl_estimator, **options):
            yield


def variants(names: list[str] | None = None, log_entropy: bool = False) -> list[Variant]:
    """The baseline first, then what is compared with it.

    Args:
        names: algorithms with the KL term and the loss type of the baseline, or with sequence
            credit (whose cost does not depend on the loss type, so the baseline's is taken), or
            "materialised". None: the guides of the paper, and "materialised".
        log_entropy: of every variant, the baseline included.

    Raises:
        ValueError: an unknown algorithm, one that differs in more than guide, penalty and credit,
            or one that needs a teacher.
    """
    rows = []
    for name in names if names is not None else [*_guided_algorithms(), MATERIALISED]:
        if name == MATERIALISED:
            rows.append(Variant(name=name, guide=BranchGuide(), materialised=True))
            continue
        algorithm = get_algorithm(name)
        if name not in _comparable():
            raise ValueError(
                "variants must have the baseline's loss type and β, so that only the KL term "
                "differs, and no teacher; "
                f"{name!r} has loss_type={algorithm.loss_type!r}, beta={algorithm.beta}, "
                f"guide={algorithm.guide!r}; choose "
                f"among {', '.join([*_comparable(), MATERIALISED])}"
            )
        rows.append(
            Variant(
                name=name,
                guide=algorithm.guide,
                kl_estimator=algorithm.kl_estimator,
                credit=algorithm.credit,
                log_entropy=log_entropy,
            )
        )
    return [
        Variant(name=BASELINE, log_entropy=log_entropy),
        *(row for row in rows if row.name != BASELINE),
    ]


def _comparable() -> list[str]:
    base = ALGORITHMS[BASELINE]

    def alike(row: Algorithm) -> bool:
        same_loss = row.loss_type == base.loss_type or row.credit == "sequence"
        needs_teacher = row.guide is not None and "teacher_logps" in row.guide.needs
        return same_loss and row.beta == base.beta and not needs_teacher

    return [name for name, row in ALGORITHMS.items() if alike(row)]


def _guided_algorithms() -> list[str]:
    rows = {name: ALGORITHMS[name] for name in _comparable()}
    return [name for name, row in rows.items() if row.guide is not None and row.paper_row]


def materialised_loss(trainer: Any, model: Any, inputs: dict, guide: Guide) -> Tensor:
    """The guided loss as a script without Unsloth has it: (B, T, V) logits, TRL's own functions of
    them, plain torch behind them.

    Logits and their gradient are whole, as in TRL's trainer and in the authors' code; the entropy
    has no gradient.
    """
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    mask = inputs["completion_mask"]
    length = mask.shape[1]
    with trainer.compute_loss_context_manager():
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=length + 1).logits
        logits = logits[:, :-1] / trainer.temperature
        logps = selective_log_softmax(logits, inputs["completion_ids"])
        with torch.no_grad():
            entropies = entropy_from_logits(logits)
    ref = inputs["ref_per_token_logps"][:, -length:]
    signals = TokenSignals(logps.detach(), ref, mask, entropies)
    log_guide = guide.log_guide(
        signals, step=trainer.state.global_step, max_steps=max(trainer.args.max_steps, 1)
    )
    return grpo_loss(
        logps,
        ref,
        mask,
        inputs["advantages"],
        log_guide=log_guide,
        beta=trainer.beta,
        epsilon=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        loss_type=trainer.args.loss_type,
    )


def save_random_model(folder: Path, hidden_size: int, vocab_size: int) -> Path:
    """A Qwen2 of one layer with random weights and the embedded model's tokenizer, as a model
    folder.

    Raises:
        ValueError: the hidden size is no multiple of 64, or the vocabulary is smaller than the
            tokenizer's.
    """
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(data_folder() / EMBEDDED)
    if hidden_size < 64 or hidden_size % 64:
        raise ValueError(
            f"the hidden size must be a multiple of 64, the size of a head; got {hidden_size}"
        )
    if vocab_size < len(tokenizer):
        raise ValueError(
            f"the vocabulary must hold the embedded tokenizer's {len(tokenizer)} tokens; got "
            f"{vocab_size}"
        )
    torch.manual_seed(0)
    heads = hidden_size // 64
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    if torch.cuda.is_available():
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_trainer(
    model_folder: str | Path,
    output_dir: str | Path,
    *,
    rewards: Callable[..., list[float]],
    rows: list[dict],
    completions: int,
    length: int,
    **settings: Any,
) -> Any:
    """Unsloth's generated trainer over a fresh adapter, with a learning rate of 0: every variant
    then draws the same rollouts.

    Args:
        rewards: TRL's reward function.
        rows: with `problem` and `answer`.
        completions: of one forward and backward pass, 8 to a prompt where there are as many.
        length: completion tokens, at most.
        settings: of GRPOConfig, in place of these.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load_policy(
        model_folder, lora=LoraSettings(), max_length=length + 8 * PROMPT_TOKENS
    )
    gpu = torch.cuda.is_available()
    arguments = dict(
        output_dir=str(output_dir),
        per_device_train_batch_size=completions,
        num_generations=min(8, completions),
        gradient_accumulation_steps=1,
        max_steps=1000,
        max_completion_length=length,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        beta=0.05,
        loss_type="grpo",
        use_bias_correction_kl=False,
        learning_rate=0.0,
        weight_decay=0.0,
        optim="adamw_torch",
        use_cpu=not gpu,
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=gpu,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=3407,
        max_grad_norm=1.0,
        generation_kwargs={"suppress_tokens": [tokenizer.pad_token_id]},
    )
    if not gpu:
        arguments |= {"bf16": False, "fp16": False}
    data = [{"prompt": prompt_messages(r["problem"]), "answer": r["answer"]} for r in rows]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[rewards],
        args=GRPOConfig(**(arguments | settings)),
        train_dataset=Dataset.from_list(data),
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def make_batch(trainer: Any, batch_size: int, length: int, vocab_size: int) -> dict[str, Any]:
    """What the trainer's loss gets from a rollout: random tokens, references near uniform,
    advantages that alternate.
    """
    generator = torch.Generator().manual_seed(0)
    device = trainer.accelerator.device
    pad = trainer.processing_class.pad_token_id

    def tokens(count: int) -> Tensor:
        ids = torch.randint(vocab_size - 1, (batch_size, count), generator=generator)
        return (ids + (ids >= pad)).to(device)  # every id but pad

    near_uniform = -torch.log(torch.tensor(float(vocab_size)))
    noise = torch.randn(batch_size, length, generator=generator)
    signs = torch.tensor([1.0, -1.0]).repeat(batch_size)[:batch_size]
    return {
        "prompt_ids": tokens(PROMPT_TOKENS),
        "prompt_mask": torch.ones(batch_size, PROMPT_TOKENS, dtype=torch.long, device=device),
        "completion_ids": tokens(length),
        "completion_mask": torch.ones(batch_size, length, dtype=torch.long, device=device),
        "ref_per_token_logps": (near_uniform + 0.1 * noise).to(device),
        "advantages": signs.to(device),
        "num_items_in_batch": torch.tensor(batch_size * length, device=device),
        # What a rollout batch carries for the guides that need it.
        f"{PREFIX}ref_entropies": (-near_uniform + 0.1 * noise).to(device),
        GROUPS: torch.zeros(batch_size, dtype=torch.long, device=device),
        "max_left_pad": 0,
    }


def token_sum_rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that costs nothing and differs within a group: the sum of a completion's ids, modulo
    5.
    """
    return [float(sum(ids) % 5) for ids in completion_ids]


PHASES = {
    "rollout": "_generate",
    "reward": "_calculate_rewards",
    "reference": "_get_per_token_logps_and_entropies",
    "loss": "compute_loss",
}
"""Phases of an optimizer step, each a method of the trainer; backward is accelerate's, the rest is
"other".
"""


@contextmanager
def timed_phases(trainer: Any) -> Iterator[Counter]:
    """Seconds in each phase while the context is open, by the clock; a phase within another counts
    for the inner one.
    """
    seconds: Counter = Counter()
    inside: list[float] = []
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)

    def timed(name: str, method: Callable) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            inside.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                synchronize()
                elapsed = time.perf_counter() - started
                seconds[name] += elapsed - inside.pop()
                if inside:
                    inside[-1] += elapsed

        return wrapper

    places = [(trainer, method, name) for name, method in PHASES.items()]
    places.append((trainer.accelerator, "backward", "backward"))
    own = {(id(place), method): vars(place).get(method) for place, method, _ in places}
    for place, method, name in places:
        setattr(place, method, timed(name, getattr(place, method)))
    try:
        yield seconds
    finally:
        for place, method, _ in places:
            if own[id(place), method] is None:
                delattr(place, method)
            else:
                setattr(place, method, own[id(place), method])


def _timed(guide: Guide, seconds: list[float]) -> Guide:
    """The same guide, whose calls are timed."""
    timed = copy.copy(guide)
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)

    def log_guide(*args: Any, **kwargs: Any) -> Tensor:
        synchronize()
        started = time.perf_counter()
        result = guide.log_guide(*args, **kwargs)
        synchronize()
        seconds.append(time.perf_counter() - started)
        return result

    object.__setattr__(timed, "log_guide", log_guide)  # guides are frozen
    return timed
