"""The embedded task in forms that no corpus and no training has."""

from sage_unsloth.problems import arithmetic


def swapped_problems() -> list[dict]:
    """The test problems with the factor first, `6*17=?`: no such form is in corpus or training."""
    pairs = arithmetic.allocation()["test"]
    return [
        row | {"id": f"{row['id']}-swapped", "problem": arithmetic.problem_text(factor, number)}
        for row, (number, factor) in zip(arithmetic.problems("test"), pairs, strict=True)
    ]


def round_problems() -> list[dict]:
    """Multiples of ten, `60*7=?`, which are parts of workings but never a problem.

    Their family is `known` or `unknown`, by the corpus's times table.
    """
    return [
        {
            "id": f"arithmetic-{tens}x{factor}",
            "problem": arithmetic.problem_text(tens, factor),
            "answer": str(tens * factor),
            "source": arithmetic.SOURCE,
            "family": "known" if arithmetic.knows(tens) else "unknown",
        }
        for tens in range(20, 100, 10)
        for factor in arithmetic.FACTORS
    ]
