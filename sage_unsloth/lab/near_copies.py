"""Measures which scores paraphrased problems and strangers get (`problems.near_copies`).

    python -m sage_unsloth.lab.near_copies --train gsm8k_train.jsonl --test gsm8k_test.jsonl \
        --out data/results/overlap

The files hold rows with `question` or `problem`. Paraphrases are made by rule of rows of the
training file: other names, other words of the same meaning, numbers in words or in digits, and the
last sentence first. They are looked for among all rows of the training file. Strangers are the rows
of the test file, which nobody has paraphrased there; where one is found it counts as a false alarm,
though real sets hold some problems that do resemble each other.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

from sage_unsloth.problems.near_copies import NEAR, best_scores
from sage_unsloth.runs.files import read_jsonl, write_json
from sage_unsloth.runs.record import environment

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)
WORDS = """one two three four five six seven eight nine ten eleven twelve"""
MEANINGS = {
    "buys": "purchases", "bought": "purchased", "makes": "produces", "gave": "handed",
    "gives": "hands", "gets": "receives", "total": "sum", "cost": "price",
    "costs": "is priced at", "money": "cash", "wants": "would like", "needs": "requires",
    "house": "home", "store": "shop", "start": "beginning", "big": "large", "small": "little",
    "every": "each", "per": "for each", "began": "started", "spends": "uses up",
    "left": "remaining", "how many": "what number of", "how much": "what amount of",
    "there are": "one counts", "find": "determine", "compute": "work out", "friends": "pals",
    "eats": "consumes",
}  # fmt: skip
NAMES = ("Mina", "Tarek", "Odile", "Bram", "Soo", "Ines", "Juno", "Pavel")


def paraphrase(text: str, rng: random.Random) -> str:
    """The problem in other words."""
    sentences = re.split(r"(?<=[.?!])\s+", text.strip())
    if len(sentences) > 1:
        sentences = [sentences[-1], *sentences[:-1]]
    text = " ".join(sentences)
    capitals = re.findall(r"(?<![.?!] )(?<!^)\b[A-Z][a-z]{2,}\b", text)
    for name in dict.fromkeys(capitals):
        text = re.sub(rf"\b{name}\b", rng.choice(NAMES), text)
    for word, other in MEANINGS.items():
        text = re.sub(rf"\b{word}\b", other, text, flags=re.IGNORECASE)
    text = re.sub(
        r"(?<![\d.,])(1[0-2]|[1-9])(?![\d.,%])", lambda m: WORDS.split()[int(m[1]) - 1], text
    )
    return re.sub(r"\b(\d{1,3})(\d{3})\b", r"\1,\2", text)


def measure(training: list[str], strangers: list[str], count: int) -> dict:
    """Shares of paraphrases and of strangers that are found at each threshold."""
    rng = random.Random(0)
    chosen = rng.sample(range(len(training)), count)
    copies = [paraphrase(training[i], rng) for i in chosen]
    scores = best_scores(copies, training)
    right = [score if place == i else 0.0 for (score, place), i in zip(scores, chosen, strict=True)]
    others = [score for score, _ in best_scores(strangers, training)]
    rows = []
    for threshold in THRESHOLDS:
        found, false = (sum(s >= threshold for s in one) for one in (right, others))
        rows.append(
            {
                "threshold": threshold,
                "recall": round(found / count, 3),
                "false_alarms": round(false / len(others), 4),
                "precision": round(found / (found + false), 3) if found + false else None,
            }
        )
    return {
        "paraphrases": count,
        "strangers": len(others),
        "training": len(training),
        "default": NEAR,
        "thresholds": rows,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", required=True, help="rows to paraphrase and to look in")
    parser.add_argument("--test", required=True, help="strangers")
    parser.add_argument("--count", type=int, default=300, help="paraphrases (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/overlap"), help="folder")
    options = parser.parse_args()
    training, strangers = (
        [row.get("question") or row["problem"] for row in read_jsonl(file)]
        for file in (options.train, options.test)
    )
    result = measure(training, strangers, min(options.count, len(training)))
    options.out.mkdir(parents=True, exist_ok=True)
    files = {"training": Path(options.train).name, "strangers": Path(options.test).name}
    write_json(
        options.out / "near_copies.json", result | {"files": files, "environment": environment()}
    )
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
