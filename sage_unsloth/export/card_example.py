"""The example code in a model card."""

import json

from sage_unsloth.runs.text import printable

QUESTION = "12*6=?"
FOUR_BIT = """four_bit = BitsAndBytesConfig(  # it was trained on such weights
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)"""


def example(
    kind: str, loads_from: str, loads_on: str | None, tokens: int, in_4bit: bool = False
) -> str:
    """Code that asks the model one question, as Markdown.

    Args:
        kind, loads_from, loads_on: see `model_card`.
        tokens: maximal length of the answer.
        in_4bit: an adapter for 4-bit weights.
    """
    if kind == "gguf":
        return (
            "With llama.cpp, or anything that reads GGUF and its chat template:\n\n```bash\n"
            "llama-cli -m FILE.gguf --jinja\n```"
        )
    folder = f"folder = {string(loads_from)}  # this folder, or where you put it"
    tokenizer = "tokenizer = AutoTokenizer.from_pretrained(folder)"
    classes = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    ask = f"""
question = [{{"role": "user", "content": {string(QUESTION)}}}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(**inputs, max_new_tokens={tokens}, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))"""
    if kind == "merged":
        model = 'model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")'
        return _code_block(classes, "", folder, model, tokenizer, ask)
    how = 'dtype="auto"'
    if in_4bit:
        classes = classes.replace("Tokenizer", "Tokenizer, BitsAndBytesConfig")
        how += ", quantization_config=four_bit"
    on = f"AutoModelForCausalLM.from_pretrained({string(loads_on or '')}, {how})"
    peft, warning = "from peft import PeftModel", ""
    if loads_on is None:
        peft = "from peft import PeftConfig, PeftModel"
        on = (
            "AutoModelForCausalLM.from_pretrained(\n"
            f"    PeftConfig.from_pretrained(folder).base_model_name_or_path, {how}\n)"
        )
        warning = (
            "It belongs on the model that this run started from, which is not on the hub; "
            "adapter_config.json names its folder.\n\n"
        )
    model = "model = PeftModel.from_pretrained(base, folder)"
    lines = [peft, classes, "", folder, *([FOUR_BIT] if in_4bit else []), f"base = {on}", model]
    return warning + _code_block(*lines, tokenizer, ask)


def _code_block(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def string(text: str) -> str:
    """A Python literal on one line."""
    return json.dumps(printable(text), ensure_ascii=False)
