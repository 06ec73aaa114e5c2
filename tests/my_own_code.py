"""What a user may bring: a verifier, a reward, a rule for advantages, and a guide."""

from dataclasses import dataclass


def first_is_later(answer, gold):
    """Whether the answer begins with a later letter than the gold."""
    return answer[:1] > gold


def same_text(answer, gold):
    return answer.strip() == gold


def vowels(completions, level):
    """A tenth for each vowel, more at a higher level; nothing is said of an empty completion."""
    texts = [turns[-1]["content"] for turns in completions]
    return [
        sum(letter in "aeiou" for letter in text) / 10 * (1 + one) if text else None
        for text, one in zip(texts, level, strict=True)
    ]


def digits(completions):
    return [sum(letter.isdigit() for letter in turns[-1]["content"]) / 10 for turns in completions]


def surprising(rewards, mean_logps, lift=0.1):
    """The reward above its group's mean, and a little for what the policy found unlikely."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred - lift * (mean_logps - mean_logps.mean(dim=1, keepdim=True))


@dataclass(frozen=True)
class Lift:
    """q = 1 + amount where the reference finds the token unlikely."""

    amount: float = 0.2
    needs = frozenset()
    causal = True

    def log_guide(self, signals, *, step, max_steps, generator=None):
        q = 1 + self.amount * (signals.ref_logps < -3.7)
        return (q.log() * signals.mask).float()
