"""Small policies written out as trees: a softmax at each state, every completion listed.

Everything is float64, in nats. Shapes: C completions, T tokens of the longest, E edges. An edge is
a token at a state, a state is a prefix; values of edges (E,) become values of the completions'
tokens (C, T), the package's (B, T), by `Tree.table`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_unsloth.objective.protocols import Guide
from sage_unsloth.objective.signals import TokenSignals


@dataclass(frozen=True)
class Tree:
    """All completions of one prompt.

    Attributes:
        completions: the tokens of each; none is a prefix of another, because a completion ends
            where it ends.
        rewards: r of each, (C,).
        edge_of: edge of each token, 0 where there is none, (C, T).
        mask: 1.0 where there is a token, (C, T).
        state_of: state of each edge, (E,).
        prefixes: the prefix that each state is.
    """

    completions: tuple[tuple[str, ...], ...]
    rewards: Tensor
    edge_of: Tensor
    mask: Tensor
    state_of: Tensor
    prefixes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rewards: Mapping[str, float] | Mapping[tuple[str, ...], float]) -> "Tree":
        """The tree of completions -> reward; in a string each letter is a token.

        Raises:
            ValueError: no completion, an empty one, or one that is a prefix of another.
        """
        completions = tuple(tuple(c) for c in rewards)
        if not completions or () in completions:
            raise ValueError(
                f"a tree needs completions of at least one token, got {list(rewards)}. Leave the "
                "empty one out"
            )
        prefixes = tuple(dict.fromkeys(c[:t] for c in completions for t in range(len(c))))
        for c in completions:
            if c in prefixes:
                raise ValueError(
                    f"no completion may be a prefix of another, got {c}. Give it an end token"
                )
        edges = list(dict.fromkeys((c[:t], c[t]) for c in completions for t in range(len(c))))
        number = {edge: i for i, edge in enumerate(edges)}
        length = max(map(len, completions))
        rows = [[number[c[:t], c[t]] for t in range(len(c))] for c in completions]
        return cls(
            completions,
            torch.tensor(list(rewards.values()), dtype=torch.float64),
            torch.tensor([row + [0] * (length - len(row)) for row in rows]),
            torch.tensor(
                [[1.0] * len(row) + [0.0] * (length - len(row)) for row in rows],
                dtype=torch.float64,
            ),
            torch.tensor([prefixes.index(prefix) for prefix, _ in edges]),
            prefixes,
        )

    @property
    def num_edges(self) -> int:
        return len(self.state_of)

    def index(self, completion: Sequence[str]) -> int:
        """The number of a completion."""
        return self.completions.index(tuple(completion))

    def logps(self, logits: Tensor) -> Tensor:
        """log π(y_t | s_t) of a softmax over each state's edges, (E,); carries the gradient."""
        self.check_shape("logits", logits, (self.num_edges,))
        member = self.state_of == torch.arange(len(self.prefixes)).unsqueeze(1)
        normaliser = torch.where(member, logits, -torch.inf).logsumexp(1)
        return logits - normaliser[self.state_of]

    def table(self, values: Tensor) -> Tensor:
        """Values of edges (E,) as those of the completions' tokens, (C, T), 0 beyond the end."""
        self.check_shape("values", values, (self.num_edges,))
        return values[self.edge_of] * self.mask

    def completion_logps(self, logps: Tensor) -> Tensor:
        """log π(y | x), (C,), of log π(y_t | s_t), (E,)."""
        return self.table(logps).sum(1)

    def sum_over_edges(self, values: Tensor) -> Tensor:
        """Σ over the completions through each edge of their values (C, T), (E,)."""
        flat = (values * self.mask).flatten()
        return torch.zeros(self.num_edges, dtype=flat.dtype).index_add(
            0, self.edge_of.flatten(), flat
        )

    def visits(self, logps: Tensor) -> Tensor:
        """Probability of reaching the state of each edge, (E,)."""
        table = self.table(logps)
        reached = (table.cumsum(1) - table).exp()
        through = self.mask.bool()
        # Every completion through an edge has one and the same prefix.
        return torch.zeros(self.num_edges, dtype=table.dtype).index_put(
            (self.edge_of[through],), reached[through]
        )

    def policy(self, probabilities: Tensor) -> Tensor:
        """log π(y_t | s_t), (E,), of the policy whose completions have these probabilities, (C,).

        Raises:
            ValueError: one is not > 0.
        """
        self.check_shape("probabilities", probabilities, (len(self.completions),))
        if not bool((probabilities > 0).all()):
            raise ValueError(
                "every completion must have a probability > 0, "
                f"got {probabilities.tolist()}. Leave impossible completions out of the tree"
            )
        weight = self.sum_over_edges(probabilities.unsqueeze(1).expand_as(self.mask))
        return self.logps(weight.log())

    def entropies(self, logps: Tensor) -> Tensor:
        """Eq. 12: H_t = −Σ_v π(v | s_t) log π(v | s_t) at the state of each edge, nats, (E,)."""
        terms = torch.zeros(len(self.prefixes), dtype=logps.dtype)
        return terms.index_add(0, self.state_of, -logps.exp() * logps)[self.state_of]

    def check_shape(self, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{name} must have the shape {shape} of this tree, got {tuple(value.shape)}"
            )


def fork_tree() -> tuple[Tree, Tensor]:
    """A small example and its log π_ref, (E,).

    `a` is usual and sure, `b` rare with six equal tokens, `c` rare and undecided between two.
    Completions that end in `+` are right.
    """
    shares = {"a+": 0.72, "a-": 0.08, "b+": 0.025} | {f"b{i}": 0.025 for i in range(1, 6)}
    shares |= {"c+": 0.03, "c-": 0.02}
    tree = Tree.of({name: float(name.endswith("+")) for name in shares})
    return tree, tree.policy(torch.tensor(list(shares.values()), dtype=torch.float64))


def chain_tree(depth: int) -> tuple[Tree, Tensor]:
    """Completions that differ in length alone, and log π_ref, (E,).

    At each of `depth` tokens there are one right end, three wrong ones and a continuation (at the
    last token a fourth wrong end), all of probability 1/5.
    """
    rewards = {"g" * t + "+": 1.0 for t in range(depth)}
    rewards |= {"g" * t + str(i): 0.0 for t in range(depth) for i in range(3 + (t == depth - 1))}
    tree = Tree.of(rewards)
    return tree, tree.logps(torch.zeros(tree.num_edges, dtype=torch.float64))


def guide_table(
    tree: Tree,
    guide: Guide,
    logps: Tensor,
    ref_logps: Tensor,
    *,
    step: int = 0,
    max_steps: int = 8,
    generator: torch.Generator | None = None,
) -> Tensor:
    """log q_t of every completion's tokens, (C, T), by the package's own guide (Eq. 9-11).

    Float32 inside. (C, T) and not (E,), because random noise and the token guide's surprisal rank
    differ between completions that share a token.

    Args:
        logps, ref_logps: log π and log π_ref, (E,).
        step, max_steps, generator: as for `Guide.log_guide`.
    """
    logps, ref_logps = logps.detach(), ref_logps.detach()
    signals = TokenSignals(
        policy_logps=tree.table(logps),
        ref_logps=tree.table(ref_logps),
        mask=tree.mask,
        entropies=tree.table(tree.entropies(logps)),
        ref_entropies=tree.table(tree.entropies(ref_logps)),
    )
    return guide.log_guide(signals, step=step, max_steps=max_steps, generator=generator).double()


def centred_guide(tree: Tree, log_guide: Tensor, logps: Tensor) -> Tensor:
    """log q_t − m with m = E_π[Σ_t log q_t] / E_π[T], the mean log q of a token, (C, T).

    Π_t q_t then no longer grows with length. m is what the mean over the tokens of a prompt's other
    completions tends to in a large group. Where all completions are equally long it is a constant
    per completion, and Eq. 4 stays.
    """
    tree.check_shape("log_guide", log_guide, tuple(tree.mask.shape))
    probability = tree.completion_logps(logps.detach()).exp().unsqueeze(1)
    mean = (probability * tree.mask * log_guide).sum() / (probability * tree.mask).sum()
    return (log_guide - mean) * tree.mask


def edge_guide(tree: Tree, log_guide: Tensor, logps: Tensor) -> Tensor:
    """E_π[q_t | the edge], (E,): a token's mean guide over the completions through its edge.

    This is what a penalty as a loss sees of it in expectation, since its gradient is linear in q:
    −E[q_t π_ref/π ∇log π].

    Args:
        log_guide: log q_t, (C, T).
        logps: log π(y_t | s_t), (E,).
    """
    probability = tree.completion_logps(logps.detach()).exp().unsqueeze(1).expand_as(tree.mask)
    return tree.sum_over_edges(probability * log_guide.exp()) / tree.sum_over_edges(probability)


def anchor_shift(tree: Tree, log_guide: Tensor, logps: Tensor, ref_logps: Tensor) -> float:
    """How much a guide changes the anchor's *shape*: a total variation in [0, 1].

    It is that between q·π_ref, normalised at each state, and π_ref, the mean over the states that a
    completion of π visits. q is `edge_guide`; a q that
    depends on the state alone drops out.
    """
    anchor = tree.logps(ref_logps + edge_guide(tree, log_guide, logps).log())
    apart = (anchor.exp() - ref_logps.exp()).abs() / 2
    visits = tree.visits(logps)
    states = torch.stack([visits[tree.state_of == s][0] for s in range(len(tree.prefixes))])
    return float((visits * apart).sum() / states.sum())


def from_here(values: Tensor) -> Tensor:
    """Σ_{t'>=t} of the values of each completion's tokens, (C, T)."""
    return values.flip(1).cumsum(1).flip(1)
