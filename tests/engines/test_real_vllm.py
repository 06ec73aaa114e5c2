"""`VllmEngine` with the real vLLM on a CPU, against transformers."""

from collections import Counter
from dataclasses import replace

import pytest
from real_engine import (
    BASE,
    CONFIG,
    FEW,
    by_transformers,
    make_adapter,
    next_token_probabilities,
    requests,
)

from sage_unsloth.sampling.engine_errors import EngineError
from sage_unsloth.sampling.vllm_engine import VllmEngine

pytestmark = pytest.mark.vllm_cpu


def test_a_completion_is_a_function_of_its_seed_alone_or_in_a_batch():
    engine = VllmEngine(BASE, max_length=128)
    prompts, seeds = requests(engine.tokenizer, 4, 16)
    together = engine.draw(prompts, seeds, CONFIG)
    assert engine.draw(prompts, seeds, CONFIG) == together
    assert len({one.text for one in together}) > 40
    order = sorted(range(64), key=lambda i: seeds[i])
    again = engine.draw([prompts[i] for i in order], [seeds[i] for i in order], CONFIG)
    changed = sum(again[place] != together[i] for place, i in enumerate(order))
    for i in range(0, 64, 16):
        (alone,) = engine.draw([prompts[i]], [seeds[i]], CONFIG)
        changed += alone != together[i]
    assert changed <= 1, "up to rare rounding"
    other = engine.draw(prompts, [seed + 1 for seed in seeds], CONFIG)
    assert sum(a != b for a, b in zip(other, together, strict=True)) > 50


def test_what_may_be_drawn_is_drawn_as_often_as_the_model_says_and_nothing_else():
    """4,000 tokens for each filter, by chi-squared against transformers' probabilities."""
    import torch

    engine, model = VllmEngine(BASE, max_length=64), by_transformers()
    tokenizer = engine.tokenizer
    ids = tokenizer("17=", add_special_tokens=False)["input_ids"]

    def drawn(**settings):
        texts = engine.draw([ids] * 4000, range(4000), replace(FEW, **settings))
        return Counter(one.text for one in texts)

    def check(found, p):
        p = p / p.sum()
        allowed = [token for token in range(len(p)) if p[token] > 0]
        texts = {tokenizer.decode([token]) for token in allowed if token not in engine.stops}
        assert set(found) <= texts | {""}, "nothing else"
        likely = [t for t in allowed if 4000 * p[t] >= 5 and t not in engine.stops]
        chi = sum(
            (found[tokenizer.decode([t])] - 4000 * float(p[t])) ** 2 / (4000 * float(p[t]))
            for t in likely
        )
        assert len(likely) >= 2 and chi < 3 * len(likely) + 15
        return len(allowed)

    p = next_token_probabilities(model, tokenizer, ids, 0.7)
    check(drawn(temperature=0.7), p)
    p = next_token_probabilities(model, tokenizer, ids, 2.0)
    everything = int((p > 0).sum())
    assert check(drawn(temperature=2.0, min_p=0.05), torch.where(p >= 0.05 * p.max(), p, 0.0)) < 100
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    kept = torch.zeros_like(p)
    kept[order[before < 0.8]] = p[order[before < 0.8]]
    assert 2 <= check(drawn(temperature=2.0, top_p=0.8), kept) < everything
    few = torch.zeros_like(p)
    few[order[:5]] = p[order[:5]]
    assert check(drawn(temperature=2.0, top_k=5), few) == 5


def test_the_pad_token_is_never_drawn():
    """Where the model would draw it often: a digit is made the pad token."""
    engine = VllmEngine(BASE, max_length=64)
    tokenizer = engine.tokenizer
    ids = tokenizer("17=", add_special_tokens=False)["input_ids"]
    usual = Counter(one.text for one in engine.draw([ids] * 1000, range(1000), FEW))
    (often, count), *_ = usual.most_common(1)
    assert len(often) == 1 and count > 50
    tokenizer.pad_token = often
    (pad,) = tokenizer(often, add_special_tokens=False)["input_ids"]
    assert tokenizer.pad_token_id == pad
    found = Counter(one.text for one in engine.draw([ids] * 1000, range(1000), FEW))
    assert found[often] == 0 and found.total() == 1000


def test_log_probs_are_those_of_transformers_for_each_adapter(tmp_path):
    """Base and two adapters, switched back and forth on one engine, in float32."""
    import torch
    from vllm import SamplingParams

    adapters = [make_adapter(tmp_path / str(rank), rank, rank) for rank in (8, 20)]
    engine = VllmEngine(BASE, adapters, max_length=128)
    assert engine.arguments["max_lora_rank"] == 32
    prompts, seeds = requests(engine.tokenizer, 4, 2)
    texts, apart = {}, 0.0
    for adapter in (None, adapters[0], adapters[1], adapters[0], None):
        engine.use(adapter)
        outputs = engine.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            [SamplingParams(seed=s, max_tokens=24, logprobs=0) for s in seeds],
            lora_request=engine.lora_request,
            use_tqdm=False,
        )
        model, base = by_transformers(adapter), by_transformers()
        for ids, output in zip(prompts, outputs, strict=True):
            made = list(output.outputs[0].token_ids)
            whole = torch.tensor([list(ids) + made])
            with torch.no_grad():
                rows = [
                    m(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1) for m in (model, base)
                ]
            expected, below = (r[torch.arange(len(made)), made] for r in rows)
            said = [
                step[t].logprob for step, t in zip(output.outputs[0].logprobs, made, strict=True)
            ]
            assert torch.allclose(torch.tensor(said), expected, atol=1e-4)
            apart = max(apart, (expected - below).abs().max().item())
        drawn = engine.draw(prompts, seeds, CONFIG)
        assert texts.setdefault(adapter, drawn) == drawn, "as before the others"
    assert apart > 0.5, "adapters that do nothing prove nothing"
    assert texts[None] != texts[adapters[0]] != texts[adapters[1]]


def test_stop_tokens_end_a_completion_and_are_left_out():
    engine = VllmEngine(BASE, max_length=128)
    prompts, seeds = requests(engine.tokenizer, 8, 8)
    usual = engine.draw(prompts, seeds, CONFIG)
    assert {one.finish_reason for one in usual} == {"stop", "length"}
    for one in usual:
        assert one.finish_reason == "stop" or one.num_tokens == CONFIG.max_completion_length
        assert engine.tokenizer.eos_token not in one.text
    equals = engine.tokenizer("=", add_special_tokens=False)["input_ids"]
    engine.stops = [*engine.stops, *equals]
    for before, one in zip(usual, engine.draw(prompts, seeds, CONFIG), strict=True):
        assert one.text == before.text.partition("=")[0]
        assert one.finish_reason == ("stop" if "=" in before.text else before.finish_reason)


def test_the_prefix_cache_changes_nothing():
    with_cache = VllmEngine(BASE, max_length=128, arguments={"block_size": 32})
    prompts, seeds = requests(with_cache.tokenizer, 3, 4)
    prompts = [[5, 6, 7, 8] * 10 + list(ids) for ids in prompts]
    first = with_cache.draw(prompts, seeds, CONFIG)
    again = with_cache.llm.generate([{"prompt_token_ids": prompts[0]}], use_tqdm=False)
    assert again[0].num_cached_tokens >= 32, "it is used"
    assert with_cache.draw(prompts, seeds, CONFIG) == first
    arguments = {"block_size": 32, "enable_prefix_caching": False}
    without = VllmEngine(BASE, max_length=128, arguments=arguments)
    cold = without.draw(prompts, seeds, CONFIG)
    assert sum(a != b for a, b in zip(cold, first, strict=True)) <= 1, "up to rare rounding"


def test_a_prompt_that_does_not_fit_is_refused_and_the_engine_goes_on():
    engine = VllmEngine(BASE, max_length=64)
    fits = [[5] * 32], [1]
    before = engine.draw(*fits, CONFIG)
    for length in (33, 70):
        with pytest.raises(
            ValueError, match=rf"the engine's 64 tokens, got {length + 32}, of which"
        ):
            engine.draw([[5] * length], [1], CONFIG)
    assert engine.draw(*fits, CONFIG) == before


def test_the_format_of_the_weights_is_the_models_own_unless_it_is_set(tmp_path):
    import torch

    half = tmp_path / "half"
    by_transformers(dtype="bfloat16").save_pretrained(half)
    for file in BASE.glob("*token*"):
        (half / file.name).write_bytes(file.read_bytes())

    def loaded(path, **options):
        engine = VllmEngine(path, max_length=64, **options)
        found = engine.llm.llm_engine.model_config.dtype
        assert engine.arguments["dtype"] == str(found).removeprefix("torch.")
        return found

    assert loaded(BASE) == torch.float32
    assert loaded(half) == torch.bfloat16
    assert loaded(half, dtype="float32") == torch.float32


def test_what_fails_is_named_with_its_phase():
    with pytest.raises(ValueError, match=r"max_num_sequences. The nearest: max_num_seqs"):
        VllmEngine(BASE, arguments={"max_num_sequences": 4})
    with pytest.raises(EngineError, match=r"must start, but failed: .* If memory ran out"):
        VllmEngine(BASE, max_length=128, arguments={"kv_cache_memory_bytes": 10**15})


def test_the_bar_moves_during_a_call():
    engine = VllmEngine(BASE, max_length=128, arguments={"max_num_seqs": 4})
    prompts, seeds = requests(engine.tokenizer, 4, 6)
    told, left = [], []
    step = engine.llm.llm_engine.step

    def stepped():
        told.append(sum(left))
        return step()

    engine.llm.llm_engine.step = stepped
    drawn = engine.stream(zip(prompts, seeds, strict=True), CONFIG, left.append)
    assert next(drawn)[0] == 0
    assert sum(left) == 24, "all 24 of the one call"
    assert len(set(told)) > 6 and told[-1] < 24, "while the engine was at work"
