"""Continuous batching on a CPU: the place of a completion that ends is given to the next prompt.

`generate` runs a batch until its longest completion ends, and computes the ended rows meanwhile.
Here rows that have ended leave the cache of keys and values, and the prompts that wait take their
places. transformers' own `generate_batch` fills places too, but it has one random generator for all
requests, so that a completion would depend on what else is drawn.

The cache is padded on the left, so that all rows write the same column in a step: a row of p prompt
and t completion tokens has the last p + t columns. A prompt is computed alone, without padding, and
once for the completions of it that follow each other.

Shapes: B rows in flight, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sage_unsloth.sampling.token_streams import row_uniforms

RENEWED = 8
"""Rows are let in or taken out once they are 1 of so many: either copies the whole cache."""

Request = tuple[Sequence[int], int]
"""Token ids of a prompt, and the seed of its completion."""


def can_refill(model: Any) -> bool:
    """Whether rows of the model's cache can be taken out and put in: keys and values of every
    token, positions that are given, and a forward pass that Unsloth does not replace.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config = base.config
    return (
        base.device.type == "cpu"
        and not config.is_encoder_decoder
        and config.get_text_config(decoder=True) is config
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
        and {"position_ids", "logits_to_keep"} <= set(inspect.signature(base.forward).parameters)
    )


@dataclass(eq=False)
class _Row:
    """One completion in flight."""

    number: int
    prompt: tuple[int, ...]
    uniforms: Any  # its random stream
    ids: list[int] = field(default_factory=list)
    ended: bool = False


def sample_refilling(
    model: Any,
    requests: Iterable[Request],
    choose: Callable[[Any, Any], Any],
    stops: Sequence[int],
    *,
    size: int,
    length: int,
) -> Iterator[tuple[int, list[int]]]:
    """Completions as they end.

    Args:
        model: of which `can_refill` is true.
        requests: taken as there is room for them, so that a caller can end them early.
        choose: (logits (B, V), float32; numbers in [0, 1), (B,), float64) -> token ids (B,).
        stops: ids of the tokens that end a completion.
        size: rows in flight at most.
        length: tokens of a completion at most.

    Yields:
        The request's number, from 0, and the completion's token ids, the one that ended it
        included.
    """
    import torch

    waiting = enumerate(requests)
    flight = _Flight(model)
    more = True
    while True:
        alive = sum(not row.ended for row in flight.rows)
        new: list[_Row] = []
        if more and size - alive >= (max(1, size // RENEWED) if alive else 1):
            new = [
                _Row(number, tuple(prompt), row_uniforms([seed], length)[0])
                for number, (prompt, seed) in islice(waiting, size - alive)
            ]
            more = len(new) == size - alive
        if new or len(flight.rows) - alive >= max(1, len(flight.rows) // RENEWED):
            flight.renew(new)
        if not flight.rows:
            return
        numbers = [row.uniforms[min(len(row.ids), length - 1)] for row in flight.rows]
        tokens_B = choose(flight.logits_BV, torch.tensor(numbers, dtype=torch.float64))
        ended = []
        for row, token in zip(flight.rows, tokens_B.tolist(), strict=True):
            if not row.ended:
                row.ids.append(token)
                row.ended = token in stops or len(row.ids) == length
                if row.ended:
                    ended.append(row)
        for row in ended:
            yield row.number, row.ids
        if not all(row.ended for row in flight.rows):
            flight.step(tokens_B)


class _Flight:
    """The rows in flight, their cache, and the logits of their next tokens."""

    def __init__(self, model: Any):
        self.model, self.rows = model, []
        self.layers: list[Any] = []  # of the cache
        self.mask: Any = None  # (B, columns of the cache)
        self.logits_BV: Any = None
        # Prompt -> (keys and values of each layer, logits), of the last ones that were let in.
        self._prompts: dict[tuple[int, ...], tuple[list, Any]] = {}

    def renew(self, new: Sequence[_Row]) -> None:
        """Takes out the rows that have ended, and columns that no row needs; lets new ones in."""
        import torch

        from sage_unsloth.sampling.roomy_cache import RoomyLayer

        selected = [i for i, row in enumerate(self.rows) if not row.ended]
        added = {
            prompt: self._prompts.get(prompt) or self._prefill(prompt)
            for prompt in dict.fromkeys(row.prompt for row in new)
        }
        self._prompts = added or self._prompts
        before, self.rows = self.layers, [self.rows[i] for i in selected] + list(new)
        if not self.rows:
            return
        columns = [len(row.prompt) + len(row.ids) for row in self.rows]
        width, old = max(columns), max(columns[: len(selected)], default=0)
        self.mask = torch.tensor([[0] * (width - n) + [1] * n for n in columns])
        logits = [self.logits_BV[selected]] if selected else []
        self.logits_BV = torch.cat([*logits, *(added[row.prompt][1] for row in new)])
        self.layers = []
        for number, like in enumerate(before or next(iter(added.values()))[0]):
            layer = RoomyLayer.of_shape(like, len(self.rows), width)
            for which, buffer in enumerate(layer.buffers):
                if selected:
                    whole = before[number].pair[which]
                    buffer[: len(selected), :, width - old : width] = whole[selected, :, -old:]
                for place, row in enumerate(new, len(selected)):
                    part = added[row.prompt][0][number].pair[which]
                    buffer[place, :, width - len(row.prompt) : width] = part[0]
            self.layers.append(layer)

    def step(self, tokens_B: Any) -> None:
        """Adds a token to each row, and computes the logits of the next."""
        import torch

        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], 1)
        # A row that has ended stays where it is: some models have no position behind.
        positions = [[len(row.prompt) + len(row.ids) - 1] for row in self.rows]
        self.logits_BV = self._forward(
            tokens_B[:, None],
            self.layers,
            attention_mask=self.mask,
            position_ids=torch.tensor(positions),
        )

    def _prefill(self, prompt: Sequence[int]) -> tuple[list, Any]:
        """The layers of a cache with the prompt, and the logits behind it."""
        import torch

        from sage_unsloth.sampling.roomy_cache import RoomyLayer

        layers = [RoomyLayer() for _ in range(self.model.config.num_hidden_layers)]
        return layers, self._forward(torch.tensor([prompt]), layers, logits_to_keep=1)

    def _forward(self, input_ids: Any, layers: list[Any], **inputs: Any) -> Any:
        import torch
        from transformers.cache_utils import Cache

        with torch.inference_mode():
            result = self.model(
                input_ids=input_ids, past_key_values=Cache(layers=layers), use_cache=True, **inputs
            )
            return result.logits[:, -1].float()
