"""The plan's arithmetic against real tensors, real caches, real files, and its own consistency."""

from dataclasses import replace

import pytest
import torch
from meta_models import SHAPES, config_of, meta_model

from sage_unsloth.planning.architecture import architecture_of
from sage_unsloth.planning.fitting import (
    check_fits,
    fit_to_memory,
    memory_of_card,
    memory_savings,
    plan_setup,
)
from sage_unsloth.planning.memory import (
    GIB,
    kv_bytes_per_token,
    layer_numbers_per_token,
    lora_parameters,
    memory_plan,
    optimizer_bytes,
    trained_parameters,
)
from sage_unsloth.planning.plan import (
    duration,
    full_report,
    size,
    step_plan,
)
from sage_unsloth.planning.presets import CARDS, MODELS
from sage_unsloth.planning.setup import Setup, setup_for

SEVEN = MODELS["qwen2.5-math-7b"]
TINY = SHAPES["qwen3, heads of their own size"][1]


def item(plan, name):
    return next(item for item in plan.items if item.name == name)


@pytest.mark.parametrize("name", ["qwen2.5-math-7b", "qwen2.5-3b-instruct", "llama"])
@pytest.mark.parametrize("targets", [None, ("q_proj", "v_proj", "down_proj")])
def test_lora_parameters_are_those_of_peft(name, targets):
    from peft import LoraConfig, get_peft_model

    from sage_unsloth.models.loading import LORA_TARGETS

    family, architecture = SHAPES[name]
    config = LoraConfig(r=8, target_modules=list(targets or LORA_TARGETS), task_type="CAUSAL_LM")
    with torch.device("meta"):
        model = get_peft_model(meta_model(config_of(architecture, family)), config)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert lora_parameters(architecture, 8, targets) == trainable


def test_unknown_lora_target_is_refused():
    with pytest.raises(
        ValueError, match=r"must be among q_proj, .*down_proj, got 'query_key_value'"
    ):
        lora_parameters(TINY, 8, ("query_key_value",))


@pytest.mark.parametrize(("dtype", "bytes_per_number"), [("bfloat16", 2), ("float32", 4)])
def test_kv_cache_is_that_of_a_real_model(dtype, bytes_per_number):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config_of(TINY, "qwen3"), dtype=getattr(torch, dtype)
    ).eval()
    ids = torch.zeros(3, 7, dtype=torch.long)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 3 * 7 * kv_bytes_per_token(TINY, bytes_per_number)


def test_4bit_weights_are_those_of_bitsandbytes():
    """Quantised as Unsloth does it: NF4 with a second quantisation of the scales."""
    from bitsandbytes.functional import quantize_4bit

    from sage_unsloth.planning.memory import BYTES_PER_4BIT_WEIGHT

    weights = torch.randn(1024, 2048, dtype=torch.bfloat16)
    packed, state = quantize_4bit(weights, blocksize=64, quant_type="nf4", compress_statistics=True)
    held = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert held == weights.numel() * BYTES_PER_4BIT_WEIGHT


def test_activations_of_a_layer_cover_what_transformers_keeps():
    """The tensors that a real layer keeps for its backward pass, in bfloat16, counted in numbers of
    2 bytes for each token.
    """
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    tokens, architecture = 32, replace(MODELS["qwen2.5-math-7b"].architecture, num_layers=1)
    small = replace(architecture, hidden_size=448, intermediate_size=2368, head_dim=16)
    config = config_of(small)
    config._attn_implementation = "sdpa"
    layer = Qwen2DecoderLayer(config, 0).to(torch.bfloat16)
    hidden = torch.randn(1, tokens, 448, dtype=torch.bfloat16, requires_grad=True)
    angles = Qwen2RotaryEmbedding(config)(hidden, torch.arange(tokens)[None])
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept, alive = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # an address is reused only after its tensor is gone
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, position_embeddings=angles)
    numbers = sum(kept.values()) / 2 / tokens
    # Beside these the backward pass holds gradients: 2 of the hidden and 2 of the intermediate
    # width.
    expected = numbers + 2 * small.hidden_size + 2 * small.intermediate_size
    # What is left over is small: angles, variances and the attention's sums.
    assert layer_numbers_per_token(small) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("recompute", [False, True])
def test_logits_kept_by_unsloths_loss(recompute, unsloth_module):
    """Unsloth's own chunked log-softmax keeps float32 logits for its backward pass; the recomputing
    one keeps none.
    """
    from unsloth_zoo import rl_replacements as zoo

    function = (
        zoo.chunked_hidden_states_selective_log_softmax_recompute
        if recompute
        else zoo.chunked_hidden_states_selective_log_softmax
    )
    rows, tokens, width, vocabulary = 2, 12, 8, 1000
    hidden = torch.randn(rows, tokens, width, requires_grad=True)
    head = torch.randn(vocabulary, width)
    index = torch.randint(vocabulary, (rows, tokens))
    kept, alive = {}, []

    def keep(tensor):
        if tensor.shape[-1:] == (vocabulary,) and len(tensor) != width:  # not the head
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(hidden, head, index, chunks=4)
    assert sum(kept.values()) == (0 if recompute else rows * tokens * vocabulary * 4)


def test_recomputed_logits_change_no_result(unsloth_module):
    """What the plan calls "same result": log-probabilities and gradient of Unsloth's two
    functions.
    """
    from unsloth_zoo import rl_replacements as zoo

    torch.manual_seed(0)
    hidden, head = torch.randn(2, 12, 8), torch.randn(50, 8)
    index, weights = torch.randint(50, (2, 12)), torch.randn(2, 12)
    found = []
    for function in (
        zoo.chunked_hidden_states_selective_log_softmax,
        zoo.chunked_hidden_states_selective_log_softmax_recompute,
    ):
        leaf = hidden.clone().requires_grad_()
        logps = function(leaf, head, index, chunks=4)
        (logps * weights).sum().backward()
        found.append((logps.detach(), leaf.grad))
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "completion", "micro_batch", "tokens", "kept"),
    [
        (2048, 1024, 8, 256, 8),  # one pass keeps everything
        (2048, 1024, 1, 256, 8),  # so do 8 passes of short completions
        (3072, 2048, 2, 512, 2),  # long completions: one pass of 2 at a time
        (40960, 20480, 8, 2048, 8),  # 40,960 // 4,096 = 10 chunks
    ],
)
def test_logits_follow_unsloths_chunks(length, completion, micro_batch, tokens, kept):
    setup = Setup(
        architecture=SEVEN.architecture,
        max_prompt_length=length - completion,
        max_completion_length=completion,
        micro_batch=micro_batch,
    )
    vocabulary = 152064
    plain = item(memory_plan(setup), "logits").bytes
    recomputed = item(memory_plan(replace(setup, recompute_logits=True)), "logits").bytes
    assert recomputed == tokens * vocabulary * 12
    assert plain - recomputed == kept * completion * vocabulary * 4


def test_files_of_a_real_run(make_trainer, tmp_path):
    """The adapter and the optimizer state that a training run writes, against the formulas."""
    trainer = make_trainer(save_strategy="steps", save_steps=1, max_steps=1, optim="adamw_torch")
    trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    architecture = architecture_of(trainer.model.get_base_model().config)
    setup = Setup(
        architecture=architecture,
        lora_rank=4,
        lora_targets=("q_proj", "v_proj", "down_proj"),
        weight_bits=32,
        optimizer_8bit=False,
    )
    adapter = checkpoint / "adapter_model.safetensors"
    header = 8 + int.from_bytes(adapter.read_bytes()[:8], "little")
    assert adapter.stat().st_size - header == 4 * trained_parameters(setup)
    states = torch.load(checkpoint / "optimizer.pt")["state"].values()
    moments = sum(state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes for state in states)
    assert moments == optimizer_bytes(setup)
    plan = step_plan(setup, 1)
    assert plan.disk_bytes == 3 * (
        4 * trained_parameters(setup) + moments
    ) + 4 * trained_parameters(setup)


def test_8bit_optimizer_of_a_real_trainer(tmp_path):
    """transformers with bitsandbytes, every weight trained: one byte a state, but the embedding's
    states in 32 bits.
    """
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    architecture = replace(
        TINY,
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        qk_norm=False,
        tied_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config_of(architecture, "llama"))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), optim="adamw_8bit", use_cpu=True, report_to="none"
    )
    optimizer = Trainer(model=model, args=arguments).create_optimizer()
    model(
        torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)
    ).loss.backward()
    optimizer.step()
    names = {id(p): name for name, p in model.named_parameters()}
    held = {}
    for parameter, state in optimizer.state.items():
        tensors = [state[key] for key in ("state1", "state2", "absmax1", "absmax2") if key in state]
        held[names[id(parameter)]] = sum(tensor.nbytes for tensor in tensors)
    # bitsandbytes leaves tensors of fewer than 4,096 numbers in 32 bits; the formula does not
    # follow it there.
    small = {name: p.numel() for name, p in model.named_parameters() if p.numel() < 4096}
    assert held["model.embed_tokens.weight"] == 256 * 96 * 8
    assert all(held[name] == 8 * count for name, count in small.items())
    setup = Setup(architecture=architecture, lora_rank=None)
    formula = optimizer_bytes(setup) - (2 + 8 / 256) * sum(small.values())
    assert sum(held.values()) - 8 * sum(small.values()) == pytest.approx(formula)


def test_sum_by_hand():
    """Qwen2.5-Math-7B, 16-bit LoRA of rank 8 on a 24 GB card with vLLM, every figure worked out
    apart from the code.
    """
    plan = memory_plan(setup_for(SEVEN, CARDS["24"]), 22.0)
    weights = 7_615_616_512 * 2
    adapter = 28 * 8 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert adapter == 20_185_088
    layer = 2048 * 2 * (10 * 3584 + 2 * 3584 + 2 * 512 + 6 * 18944 + 6 * 3584)
    logits = 256 * 152064 * 12
    always = weights + adapter * 8 + adapter * (2 + 8 / 256) + GIB
    one = 2048 * 57344
    assert layer + logits > 8 * one  # the update is the larger phase
    assert plan.peak == pytest.approx((always + layer + logits) * 1.05 + GIB)
    # More than that, so that vLLM's 78 % hold the weights, itself and one completion.
    assert plan.needed == (weights + GIB + one) / 0.78 > plan.peak
    assert plan.host == 8 * 2048 * 3584 * 28 * 2
    assert plan.rollouts_at_once == 8
    # In float32 a completion's cache is twice as large: 4 of 8 fit beside the weights.
    card = (2 * weights + GIB + 4.5 * 2 * one) / 0.78 / GIB
    wide = replace(setup_for(SEVEN, CARDS["24"]), weight_bits=32)
    assert memory_plan(wide, card).rollouts_at_once == 4


def test_activations_of_every_pass_are_held_where_none_wait_elsewhere():
    """By hand for Qwen2.5-7B: the graphs of all passes live until the one backward pass, and the
    gradients of one layer at a time.
    """
    few = Setup(architecture=SEVEN.architecture, micro_batch=2, gradient_checkpointing="none")
    kept = 8 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18944
    gradients = 2 * 3584 + 2 * 18944
    pass_, step = 2 * 2048, 8 * 2048
    expected = 2 * (28 * kept * step + pass_ * (gradients + 4 * 3584))
    assert item(memory_plan(few), "activations").bytes == expected
    layers = memory_plan(replace(few, gradient_checkpointing="layers"))
    expected = 2 * (28 * 3584 * step + pass_ * (kept + gradients + 4 * 3584))
    assert item(layers, "activations").bytes == expected


def test_full_finetuning_keeps_a_reference_when_beta_is_positive():
    setup = setup_for(MODELS["qwen2.5-3b-instruct"], CARDS["40"])
    with_kl, without = memory_plan(setup), memory_plan(replace(setup, beta=0.0))
    assert with_kl.needed - without.needed == pytest.approx(1.05 * 4 * 3_085_938_688)
    lora = replace(setup, lora_rank=8)
    assert memory_plan(lora).needed == memory_plan(replace(lora, beta=0.0)).needed


def test_phases_do_not_add_up():
    """The KV cache is free during the update: a longer cache costs nothing until it is the larger
    of the two.
    """
    setup = setup_for(SEVEN, CARDS["16"])
    plan = memory_plan(setup)
    update = sum(i.bytes for i in plan.items if i.phase == "update")
    rest = sum(i.bytes for i in plan.items if i.phase == "always" and i.name != "reserve")
    assert item(plan, "KV cache").bytes < update
    assert plan.needed == pytest.approx(1.05 * (rest + update) + GIB)
    many = memory_plan(replace(setup, prompts_per_step=8))
    assert many.needed == pytest.approx(1.05 * (rest + item(many, "KV cache").bytes) + GIB)
    assert item(many, "KV cache").bytes > update


@pytest.mark.parametrize(
    "more",
    [
        dict(micro_batch=8),
        dict(max_completion_length=2048),
        dict(max_prompt_length=2048),
        dict(prompts_per_step=32),
        dict(lora_rank=64),
        dict(weight_bits=32),
        dict(recompute_logits=False),
        dict(optimizer_8bit=False),
        dict(gradient_checkpointing="layers"),
        dict(gradient_checkpointing="none"),
        dict(use_vllm=True),
        dict(lora_rank=None),
    ],
    ids=str,
)
def test_more_of_anything_needs_more(more):
    few = Setup(architecture=SEVEN.architecture, micro_batch=1, recompute_logits=True)
    assert memory_plan(replace(few, **more)).needed > memory_plan(few).needed
    assert memory_plan(replace(few, weight_bits=4)).needed < memory_plan(few).needed


def test_vllm_must_be_able_to_start_in_its_share():
    setup = replace(setup_for(SEVEN, CARDS["24"]), gpu_memory_utilization=0.5)
    plan = memory_plan(setup, 24.0)
    one = 2048 * 57344
    assert plan.needed == (7_615_616_512 * 2 + GIB + one) / 0.5
    assert not plan.fits and plan.rollouts_at_once == 1


def test_vllm_lets_completions_wait():
    setup = replace(setup_for(MODELS["r1-distill-qwen-7b"], CARDS["24"]), prompts_per_step=4)
    plan = memory_plan(setup, 22.0)
    room = 22.0 * GIB * 0.78 - 7_615_616_512 * 2 - GIB
    assert plan.rollouts_at_once == int(room // (8192 * 57344)) == 4
    assert "vLLM runs 4 completions at a time" in full_report(setup, "x", 22.0, 10)


def test_wrong_combinations_are_refused():
    for wrong in (dict(weight_bits=4), dict(use_vllm=True)):
        with pytest.raises(ValueError, match="full fine-tuning needs 16-bit weights"):
            Setup(architecture=TINY, lora_rank=None, **wrong)
    with pytest.raises(ValueError, match="weight_bits must be 4, 16 or 32, got 8"):
        Setup(architecture=TINY, weight_bits=8)
    with pytest.raises(ValueError, match="micro_batch must be at least 1, got 0"):
        Setup(architecture=TINY, micro_batch=0)
    with pytest.raises(ValueError, match="gradient_checkpointing must be"):
        Setup(architecture=TINY, gradient_checkpointing="some")


def test_refusal_names_changes_in_order_with_what_they_save():
    setup = setup_for(MODELS["r1-distill-qwen-7b"], CARDS["24"], micro_batch=4)
    with pytest.raises(ValueError) as refusal:
        check_fits(setup, 22.0)
    head, *lines = str(refusal.value).splitlines()
    assert "must fit the GPU's 22.0 GiB, but it needs 31.4 GiB (computed)" in head
    assert [line.split(";")[0].split(":")[0].strip() for line in lines] == [
        "1. micro-batch 1 instead of 4",
        "2. rollouts by transformers instead of vLLM",
        "3. 4-bit weights",
        "4. completions of 3,072 tokens instead of 6,144",
        "Or a smaller model",
    ]
    assert lines[0].endswith("not enough") and lines[1].endswith(": enough")
    needed = memory_plan(setup, 22.0).needed
    for line, (_, changed) in zip(lines, memory_savings(setup), strict=False):
        plan = memory_plan(changed, 22.0)
        assert f"saves {(needed - plan.needed) / GIB:.1f} GiB" in line


@pytest.mark.parametrize("model", ["qwen2.5-math-7b", "qwen2.5-3b-instruct", "r1-distill-qwen-7b"])
@pytest.mark.parametrize("card", CARDS)
def test_every_remedy_saves(model, card):
    setup = setup_for(MODELS[model], CARDS[card], recompute_logits=False, micro_batch=8)
    for text, changed in memory_savings(setup):
        assert memory_plan(changed, 14.5).needed < memory_plan(setup, 14.5).needed, text


def test_what_fits_is_not_refused():
    setup = setup_for(SEVEN, CARDS["80"])
    assert check_fits(setup, 79.1) == memory_plan(setup, 79.1)


def test_settled_changes_no_more_than_needed():
    setup = setup_for(SEVEN, CARDS["24"], micro_batch=8, recompute_logits=False)
    found = fit_to_memory(setup, 22.0)
    assert not memory_plan(replace(setup, recompute_logits=True), 22.0).fits
    assert found == replace(setup, recompute_logits=True, micro_batch=1)
    assert fit_to_memory(setup, 79.1) == setup
    assert fit_to_memory(setup, 8.0) == setup  # not even 4-bit weights suffice, so nothing changes
    kept = fit_to_memory(setup, 22.0, fixed=("micro_batch",))
    assert kept == replace(setup, recompute_logits=True, weight_bits=4)


def test_given_settings_are_kept():
    setup = plan_setup(SEVEN, 22.0, micro_batch=2, weight_bits=None)
    assert setup.micro_batch == 2 and setup.weight_bits == 16
    assert plan_setup(SEVEN, None).use_vllm is False


def test_step_plan():
    setup = Setup(architecture=TINY, prompts_per_step=4, num_generations=8)
    plan = step_plan(setup, steps=1000, num_rows=2000)
    assert (plan.prompts_per_step, plan.completions_per_step, plan.steps) == (4, 32, 1000)
    assert plan.tokens_per_step == 32 * 2048
    assert plan.epochs == 2.0
    assert step_plan(setup, steps=1).epochs is None
    full = replace(setup, lora_rank=None)
    four, two = (replace(full, weight_bits=bits) for bits in (32, 16))
    more = step_plan(four, 1).disk_bytes - step_plan(two, 1).disk_bytes
    assert more == 4 * 2 * trained_parameters(full), "4 files of weights, of 4 bytes or 2"
    with pytest.raises(ValueError, match="at least one step"):
        step_plan(setup, steps=0)


def test_durations_and_sizes_are_short():
    assert [duration(s) for s in (45, 720, 31_000, 3540 + 59)] == [
        "45 s",
        "12 min",
        "8 h 37 min",
        "1 h 00 min",
    ]
    assert [size(n) for n in (5 * 2**19, 0.1 * GIB, 14.5 * GIB)] == [
        "2.5 MiB",
        "0.10 GiB",
        "14.50 GiB",
    ]


def test_size_on_the_box_is_what_such_a_card_reports():
    assert memory_of_card(24) == 22.0
    assert memory_of_card(23.6) == 23.6
    assert memory_of_card(8) == 8 * 14.5 / 16, "the size on the box, as 16 is"
    assert memory_of_card(8.0) == memory_of_card(8) and memory_of_card(7.9) == 7.9


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_without_a_card_there_is_no_verdict(capsys):
    from sage_unsloth.__main__ import main

    assert memory_of_card(None) is None
    assert main(["plan", "--model", "arithmetic-base"]) == 0
    text = capsys.readouterr().out
    assert "at the peak\n" in text and "computed, not measured on a GPU" in text


def test_command_refuses_with_a_code(capsys):
    from sage_unsloth.__main__ import main

    assert main(["plan", "--model", "qwen2.5-3b-instruct", "--memory", "24"]) == 2
    printed = capsys.readouterr()
    assert "does not fit" in printed.out
    assert "an adapter (LoRA, rank 8) instead of full fine-tuning" in printed.err


def test_rows_are_counted_in_passes():
    text = full_report(plan_setup(SEVEN, 48.0), "x", 48.0, 1000, 2000)
    assert "passes over 2,000 rows" in text and "time: not known before the first step" in text
    assert "None" not in text


def test_a_plan_of_a_preset_loads_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from sage_unsloth.__main__ import main; main(['plan', '--model', "
        "'qwen2.5-math-7b', '--memory', '24']); assert not {'torch', 'transformers'} & "
        "set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
