"""What one step of stage 2 costs on G GPUs, on paper: time, memory of a card, bytes exchanged.

Nothing here was measured. A step draws C completions of T tokens for prompts of S tokens by vLLM,
scores them under π_ref and under the policy (to weigh what vLLM drew), and makes one update of n
trained weights beside N frozen ones of two bytes, in m micro-batches a card.

    drawing      T · max(2N / M, 2N · b / (u F)) + C/G · T (S + T/2) · k / M
    scoring      4N · C/G · (S + T) / (u F)
    update       6N · C/G · (S + T) / (u F)       forward, recomputed forward, backward to the input
    exchange     bytes / L

with b = C/G completions drawn together on a card, k bytes of keys and values a token, F FLOP/s and
M bytes/s of the card, u the share of F that a pass reaches, and L bytes/s of the link that a card
sends by. Of N frozen weights the backward pass has no gradient, so an update is 6N and not 8N FLOP
a token.

    exchanged    DDP      2 (G−1)/G · 4n                          gradients, averaged in float32
                 FSDP2    4m (G−1)/G · 2N + (G−1)/G · 4n          weights for each pass, gradients
                 server   + 2N from the first process             merged weights, once a step
    memory       DDP      2N + 16n + activations
                 FSDP2    2N/G + 16n/G + 2 layers + head + activations
"""

from dataclasses import dataclass

from sage_unsloth.planning.memory import GIB, kv_bytes_per_token, layer_numbers_per_token
from sage_unsloth.planning.memory import trained_parameters as count_trained
from sage_unsloth.planning.setup import Setup

DDP, FSDP2 = "DDP", "FSDP2"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU and its links, by its data sheet.

    Attributes:
        flops: dense products in 16 bits, a second.
        bandwidth: of its memory, bytes a second.
        link: to the cards of its machine, bytes a second in one direction.
        network: to other machines, bytes a second for each card.
        per_machine: cards of one machine.
        reached: share of `flops` that a pass reaches; an assumption.
    """

    flops: float = 989e12
    bandwidth: float = 3.35e12
    link: float = 450e9
    network: float = 50e9
    per_machine: int = 8
    reached: float = 0.4


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One step; seconds, bytes and tokens.

    Attributes:
        drawing, scoring, update, exchange: seconds, one after another.
        exchanged: bytes that a card sends in a step.
        memory: of a card, bytes, without what draws.
        tokens: completion tokens of the step.
    """

    drawing: float
    scoring: float
    update: float
    exchange: float
    exchanged: float
    memory: float
    tokens: int

    @property
    def seconds(self) -> float:
        return self.drawing + self.scoring + self.update + self.exchange

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens, of all cards together."""
        return self.tokens / self.seconds


def step_cost(setup: Setup, gpus: int, split: str = DDP, card: Card | None = None) -> StepCost:
    """One step on so many cards, of which each draws for itself by vLLM.

    Args:
        setup: model, adapter, lengths and completions of a step; every completion is taken to be
            `max_completion_length` long.
        gpus: G.
        split: "DDP" or "FSDP2".
        card: its data sheet; None is an H100 SXM.

    Raises:
        ValueError: an unknown split, quantised or fully trained weights, or completions that G
            does not divide.
    """
    if split not in (DDP, FSDP2):
        raise ValueError(f"split must be {DDP} or {FSDP2}; got {split!r}")
    if setup.weight_bits != 16 or setup.lora_rank is None:
        raise ValueError(
            "the cost on paper is that of an adapter on weights of 16 bits; got weight_bits="
            f"{setup.weight_bits}, lora_rank={setup.lora_rank}; give such a setup"
        )
    each, rest = divmod(setup.completions_per_step, gpus)
    if rest or not each:
        raise ValueError(
            f"the completions of a step ({setup.completions_per_step}) must be divisible by the "
            f"cards; got {gpus}; change prompts_per_step or the cards"
        )
    card, a = card or Card(), setup.architecture
    weights, trained = 2 * a.num_parameters, count_trained(setup)
    length, flops = setup.max_completion_length, card.reached * card.flops
    caches = each * length * (setup.max_prompt_length + length / 2) * kv_bytes_per_token(a, 2)
    drawing = length * max(weights / card.bandwidth, weights * each / flops)
    a_pass = weights * each * setup.max_length / flops
    others = (gpus - 1) / gpus
    exchanged = (2 if split == DDP else 1) * others * 4 * trained
    held, state = weights, 16 * trained
    if split == FSDP2:
        exchanged += 4 * -(-each // setup.micro_batch) * others * weights
        layers = 2 * 2 * a.linear_parameters / a.num_layers
        held = weights / gpus + layers + 2 * a.vocab_size * a.hidden_size
        state /= gpus
    link = card.link if gpus <= card.per_machine else card.network
    tokens = min(setup.micro_batch, each) * setup.max_length
    numbers = a.num_layers * a.hidden_size + layer_numbers_per_token(a) + 4 * a.hidden_size
    return StepCost(
        drawing=drawing + caches / card.bandwidth,
        scoring=2 * a_pass,
        update=3 * a_pass,
        exchange=exchanged / link,
        exchanged=exchanged,
        memory=held + state + 2 * tokens * numbers,
        tokens=setup.completions_per_step * length,
    )


def table() -> list[dict[str, str]]:
    """Qwen2.5-Math-7B with the paper's adapter: 1, 8 and 64 cards of the H100's data sheet."""
    from sage_unsloth.planning.presets import model_preset
    from sage_unsloth.planning.setup import setup_for

    rows = []
    for gpus, prompts in ((1, 8), (8, 8), (8, 64), (64, 64)):
        for split in (DDP, FSDP2) if gpus > 1 else (DDP,):
            setup = setup_for(
                model_preset("qwen2.5-math-7b"),
                prompts_per_step=prompts,
                num_generations=8,
                micro_batch=8,
            )
            cost = step_cost(setup, gpus, split)
            rows.append(
                {
                    "GPUs": str(gpus),
                    "split": split if gpus > 1 else "none",
                    "completions a step": str(setup.completions_per_step),
                    "memory of a card, GiB": f"{cost.memory / GIB:.1f}",
                    "sent by a card a step": _size(cost.exchanged),
                    "drawing, s": f"{cost.drawing:.1f}",
                    "scoring and update, s": f"{cost.scoring + cost.update:.1f}",
                    "exchange, s": f"{cost.exchange:.2f}",
                    "completion tokens a second": f"{round(cost.tokens_per_second, -2):,.0f}",
                }
            )
    return rows


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
