"""What the tests of the real vLLM share: the model's own probabilities, adapters, prompts."""

from dataclasses import replace

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.problems import arithmetic
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.sampling.record_sets import prompt_ids, sample_seed

BASE = data_folder() / BASE_MODEL
CONFIG = SamplingConfig(temperature=1.0, min_p=0.0, max_completion_length=32, batch_size=64)
FEW = replace(CONFIG, max_completion_length=1)


def make_adapter(folder, rank, seed, std=0.05):
    """A peft adapter whose B is noise: put on the base, it makes another model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=std)
    model.save_pretrained(folder)
    return folder


def by_transformers(adapter=None, dtype="float32"):
    """The model by transformers and peft alone, without Unsloth."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=getattr(torch, dtype))
    return model.eval() if adapter is None else PeftModel.from_pretrained(model, adapter).eval()


def requests(tokenizer, problems, samples, seed=3407):
    """(prompts, seeds) of every sample of the first problems of the test set."""
    pairs = [
        (prompt_ids(tokenizer, row["problem"]), sample_seed(seed, row["id"], sample))
        for row in arithmetic.problems("test")[:problems]
        for sample in range(samples)
    ]
    return [ids for ids, _ in pairs], [seed for _, seed in pairs]


def next_token_probabilities(model, tokenizer, ids, temperature=1.0):
    """(V,), float64, the pad token left out: what a token is drawn from before the filters."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, -1].double()
    logits[tokenizer.pad_token_id] = -torch.inf
    return torch.softmax(logits / temperature, -1)
