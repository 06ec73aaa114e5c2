"""Pretrain a tiny base model on the corpus of an embedded task, on a CPU.

    python -m research.pretrain --out data/arithmetic-base
    python -m research.pretrain --problems fresh --seed 3408 --out data/arithmetic-fresh
    python -m research.pretrain --problems countdown --start data/arithmetic-base \\
        --steps 400 --learning-rate 2.5e-3 --out data/countdown-base
    python -m research.pretrain --problems countdown-fresh --start data/arithmetic-base \\
        --steps 400 --learning-rate 2.5e-3 --seed 3408 --out data/countdown-fresh
    python -m research.pretrain --problems fork --start data/arithmetic-fresh \\
        --steps 200 --learning-rate 2.5e-3 --seed 3410 --out runs/fork

A base of countdown goes on from that of arithmetic, which knows the prompt and the sums already,
and so takes three minutes of one core.

A plain loop: documents are drawn afresh for every batch, the loss is the cross-entropy of the text
behind the prompt, AdamW with warmup and a linear decay to 0. The model, its tokenizer and
`pretrain.json` (settings, versions, what the base scores on the test split) appear in `--out`
together or not at all.
"""

import argparse
import dataclasses
import datetime
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from research.problems import countdown, fresh
from research.problems.fork import DIALECTS
from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.countdown import COUNTDOWN
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.files import whole_folder, write_json
from sage_unsloth.runs.progress import progress
from sage_unsloth.sampling.counts import correct_matrix
from sage_unsloth.sampling.engines import SamplingConfig, TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a base model learns, and what it is measured by.

    Attributes:
        module: has the dials of the corpus.
        dials: their names, for `pretrain.json`.
        pairs: the problems that documents pose.
        test: the rows of the test split.
        checker: what makes an answer right.
    """

    module: Any
    dials: tuple[str, ...]
    pairs: Callable[[], Sequence[Any]]
    test: Callable[[], list[dict]]
    checker: Checker = MATH

    def document(self, tokenizer: Any, rng: random.Random) -> tuple[str, str]:
        return self.module.document(tokenizer, rng, self.pairs())


_ARITHMETIC_DIALS = ("ROUTES", "UNKNOWN_FROM", "UNTAGGED", "DRILLS")
_COUNTDOWN_DIALS = ("ROUTES", "SKILL", "UNTAGGED", "DRILLS", "DRILL_LENGTH")
CORPORA = {
    "first": Corpus(
        module=arithmetic,
        dials=_ARITHMETIC_DIALS,
        pairs=arithmetic.pretraining_pairs,
        test=lambda: arithmetic.problems("test"),
    ),
    "fresh": Corpus(
        module=arithmetic,
        dials=_ARITHMETIC_DIALS,
        pairs=lambda: fresh.ARITHMETIC.pretraining_problems,
        test=lambda: fresh.ARITHMETIC.problems("test"),
    ),
    "countdown": Corpus(
        module=countdown,
        dials=_COUNTDOWN_DIALS,
        pairs=countdown.pretraining_problems,
        test=lambda: countdown.problems("test"),
        checker=COUNTDOWN,
    ),
    "countdown-fresh": Corpus(
        module=countdown,
        dials=_COUNTDOWN_DIALS,
        pairs=lambda: fresh.COUNTDOWN.pretraining_problems,
        test=lambda: fresh.COUNTDOWN.problems("test"),
        checker=COUNTDOWN,
    ),
    **{
        name: Corpus(
            module=dialect,
            dials=("ROUTES", "way", "LETTERS", "NUM_LETTERS"),
            pairs=lambda: fresh.ARITHMETIC.pretraining_problems,
            test=lambda: fresh.ARITHMETIC.problems("test"),
        )
        for name, dialect in DIALECTS.items()
    },
}
"""By the value of `--problems`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of the pretraining run; the defaults are those of the shipped base."""

    steps: int = 1000  # optimizer steps
    batch_size: int = 48  # documents
    learning_rate: float = 3e-3  # peak
    warmup: int = 50  # steps
    weight_decay: float = 0.01
    seed: int = 3407
    hidden_size: int = 128
    intermediate_size: int = 320
    num_layers: int = 4
    num_heads: int = 4
    num_key_value_heads: int = 2
    num_samples: int = 64  # samples per problem in the final measurement
    problems: str = "first"  # a key of `CORPORA`
    start: str = ""  # folder of the model to go on from; "" starts from random weights


def build_model(config: PretrainConfig, tokenizer) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 model with tied embeddings, or the one of `config.start`."""
    if config.start:
        return Qwen2ForCausalLM.from_pretrained(config.start, dtype=torch.float32)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=512,
            initializer_range=0.05,
            tie_word_embeddings=True,
            use_cache=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def batch(
    tokenizer, rng: random.Random, size: int, corpus: Corpus
) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` and `labels`, both (B, T), of `size` new documents; -100 masks the rest."""
    documents = [corpus.document(tokenizer, rng) for _ in range(size)]
    contexts, texts = zip(*documents, strict=True)
    prompts, targets = tokenizer(list(contexts)).input_ids, tokenizer(list(texts)).input_ids
    rows = [
        (prompt + target, [-100] * len(prompt) + target)
        for prompt, target in zip(prompts, targets, strict=True)
    ]
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((size, length), tokenizer.pad_token_id)
    labels = torch.full((size, length), -100)
    for row, (ids, learnt) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(learnt)] = torch.tensor(learnt)
    return input_ids, labels


def train(config: PretrainConfig, tokenizer) -> Qwen2ForCausalLM:
    """Train a new model on `steps` batches of the corpus."""
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    model = build_model(config, tokenizer)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / config.warmup, (config.steps - step) / config.steps),
    )
    bar = progress(range(config.steps), desc="pretrain")
    for _ in bar:
        input_ids, labels = batch(tokenizer, rng, config.batch_size, CORPORA[config.problems])
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval()


def measure(model, tokenizer, num_samples: int, seed: int, corpus: Corpus) -> dict[str, float]:
    """On the rows of the test split at temperature 1: pass@1, pass@k for k = `num_samples`, and the
    share with an answer in tags.
    """
    config = SamplingConfig(
        num_samples=num_samples,
        temperature=1.0,
        min_p=0.0,
        max_completion_length=64,
        batch_size=512,
        seed=seed,
    )
    engine, rows = TransformersEngine(model, tokenizer), corpus.test()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        records = sample_and_grade(
            config,
            engine,
            rows,
            file,
            model="base",
            benchmark=corpus.module.SOURCE,
            checker=corpus.checker,
        )
    correct = correct_matrix(records, [row["id"] for row in rows], num_samples).sum(axis=1)
    return {
        "pass@1": round(float(np.mean(pass_at_k(num_samples, correct, 1))), 4),
        f"pass@{num_samples}": round(
            float(np.mean(pass_at_k(num_samples, correct, num_samples))), 4
        ),
        "format_share": round(sum(r["extracted"] is not None for r in records) / len(records), 4),
        "problems": len(rows),
        "samples_per_problem": num_samples,
    }


def save(model, tokenizer, report: dict, out: Path) -> None:
    """Write the model, the tokenizer and `pretrain.json` to `out`, whole or not at all.

    Raises:
        FileExistsError: `out` exists and holds no `pretrain.json`, so it is not ours to replace.
    """
    if out.exists() and any(out.iterdir()) and not (out / "pretrain.json").exists():
        raise FileExistsError(
            f"--out must be new, empty or an earlier base (with pretrain.json), got {out}"
        )
    with whole_folder(out, replace=True) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / "pretrain.json", report)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--start", default="", help="folder of the model to go on from")
    parser.add_argument("--learning-rate", type=float, default=PretrainConfig.learning_rate)
    parser.add_argument("--steps", type=int, default=PretrainConfig.steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=PretrainConfig.seed)
    parser.add_argument(
        "--samples", type=int, default=PretrainConfig.num_samples, help="of each test problem"
    )
    parser.add_argument(
        "--problems", choices=tuple(CORPORA), default="first", help="the corpus to learn"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(options.threads)
    config = PretrainConfig(
        steps=options.steps,
        learning_rate=options.learning_rate,
        seed=options.seed,
        num_samples=options.samples,
        problems=options.problems,
        start=options.start,
    )
    tokenizer = arithmetic.build_tokenizer()
    started = time.perf_counter()
    model = train(config, tokenizer)
    seconds = round(time.perf_counter() - started)
    corpus = CORPORA[config.problems]
    result = measure(model, tokenizer, config.num_samples, config.seed, corpus)
    logger.info("base on the test split: %s", result)
    report = {
        "config": dataclasses.asdict(config),
        "corpus": {name: getattr(corpus.module, name) for name in corpus.dials},
        "parameters": model.num_parameters(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": options.threads,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "train_seconds": seconds,
        "test": result,
    }
    save(model, tokenizer, report, options.out)


if __name__ == "__main__":
    main()
