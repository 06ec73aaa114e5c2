r"""Numbers as people write them, exact, and the units and nouns behind them."""

import re
from dataclasses import dataclass
from fractions import Fraction

from sage_unsloth.grading.checker import LONGEST_ANSWER

_DIGITS = r"""
    (?: (?:(?P<whole>\d+)\s+)?(?P<top>[1-9]\d*)\s*/\s*(?P<bottom>\d+)
      | (?:(?P<units>\d+)\s*)?\\frac\s*(?P<over>\{\s*-?\d+\s*\}|\d)\s*(?P<under>\{\s*\d+\s*\}|\d)
      | (?P<digits>[1-9]\d{0,2}(?:(?P<sep>,|\ |\{,\}|,\\!|\\,)\d{3})(?:(?P=sep)\d{3})*|\d+|(?=\.\d))
        (?:\.(?P<decimals>\d*))?
        (?:(?:e|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*)(?P<exponent>[+-]?\s?\d{1,3})\s*\}?)?
      | 10\s*\^\s*\{?\s*(?P<power>[+-]?\s?\d{1,3})\s*\}?
    )
"""
_NUMBER = re.compile(r"(?P<sign>[+-]?)\s*" + _DIGITS, re.VERBOSE | re.IGNORECASE)
_MONEY = re.compile(r"(?P<sign>[+-]?)\s*(?:\\\$|USD|US\$|\$)\s*(?=-?[\d.\\])")

# One name for each spelling of a unit; beside these, any nouns.
_SPELLINGS = r"""
    degree: degrees deg degs
    $: dollar dollars usd bucks
    ¢: cent cents
    €: euro euros
    m: meter meters metre metres
    cm: centimeter centimeters centimetre centimetres cms
    mm: millimeter millimeters millimetre millimetres
    dm: decimeter decimeters
    km: kilometer kilometers kilometre kilometres kms
    nm: nanometer nanometers
    pm: picometer picometers
    μm: \mum micron microns
    Å: \AA angstrom angstroms
    in: inch inches ins
    ft: foot feet
    yd: yard yards yds
    mi: mile miles
    pc: parsec parsecs
    s: sec secs second seconds
    min: minute minutes mins
    h: hr hrs hour hours
    day: days
    week: weeks
    month: months
    year: years yr yrs
    g: gram grams gm
    kg: kilogram kilograms kgs
    lb: lbs pound pounds
    oz: ounce ounces
    L: liter liters litre litres
    mL: milliliter milliliters ml
    rad: radian radians
    eV: electronvolt electronvolts
    mol: mole moles
    Hz: hertz
    Pa: pascal pascals
    erg: ergs
    K: kelvin kelvins
    J: joule joules
    N: newton newtons
    V: volt volts
    W: watt watts
    A: ampere amperes amps
    T: tesla
    C: coulomb coulombs
    F: farad farads
    Ω: ohm ohms
    bit: bits
    cal: calorie calories
    sq: square
    cu: cubic
    arcsec: arcsecs arcsecond arcseconds
    person: people
    child: children
    man: men
    woman: women
    mph: mph
    amu: amu
    AU: AU
    keV: keV
    MeV: MeV
    kJ: kJ
    kPa: kPa
    MPa: MPa
    GPa: GPa
    kcal: kcal
    kW: kW
    kN: kN
    kV: kV
    mV: mV
    mA: mA
    kHz: kHz
    MHz: MHz
    GHz: GHz
"""
UNITS: dict[str, str] = {}
for _line in _SPELLINGS.strip().split("\n"):
    _unit, _, _names = _line.strip().partition(": ")
    UNITS |= dict.fromkeys((_unit, *_names.split()), _unit)
NAMES = {unit: name for name, unit in reversed(UNITS.items()) if len(unit) == 1 < len(name)}
"""Units of one letter -> the first of their names."""
# Words that make another number, another statement or none of the number before them.
_OTHER_WORDS = """
    less more fewer greater least most under over above below between nearly almost approximately
    about around increase increased decrease decreased gain loss up down off out wrong false
    incorrect right correct true not no never neither nor isn't without except minus plus divided
    and or is are be was if then than but also maybe perhaps either both instead hundred hundreds
    thousand thousands million millions billion billions trillion trillions dozen dozens half
    halves third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths
    ninth tenth tenths hundredth hundredths thousandth thousandths squared cubed factorial root
    roots power powers base mod modulo th st nd rd k zero one two three four five six seven eight
    nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety twice double
    triple negative positive percent percentage pct many much too few to from i e x y z n hope
    answer final guess i'm reciprocal inverse opposite exactly it
"""
NOT_UNITS = frozenset(_OTHER_WORDS.split())
DEGREE_SIGN = "°"
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")


@dataclass(frozen=True)
class Quantity:
    """A number with what stands behind or before it.

    Attributes:
        value: exact.
        unit: in one spelling, "" where there is none, "%" for a percentage.
    """

    value: Fraction
    unit: str = ""


def plain_number(text: str) -> Fraction | None:
    r"""The exact value of a plainly written number, or None for any other text.

    Integers, decimals, fractions `3/4` and `\frac{3}{4}`, mixed numbers `1 3/4`, powers of ten
    `1e3`, and whole groups of thousands `1,000`.
    """
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST_ANSWER else None
    return None if match is None else _value(match)


def _value(match: re.Match) -> Fraction | None:
    if match.group().count("{") != match.group().count("}"):
        return None
    whole = match["whole"] or match["units"]
    if match["top"] or match["over"]:
        top = int(match["top"] or match["over"].strip("{} "))
        bottom = int(match["bottom"] or match["under"].strip("{} "))
        # "1 234/5" may mean 1234/5.
        if bottom == 0 or (whole and not 0 < top < bottom):
            return None
        value = Fraction(top, bottom) + int(whole or 0)
    elif match["power"]:
        value = Fraction(10) ** int(match["power"].replace(" ", ""))
    else:
        digits, decimals = re.sub(r"\D", "", match["digits"]), match["decimals"] or ""
        exponent = int((match["exponent"] or "0").replace(" ", "")) - len(decimals)
        value = int(digits + decimals) * Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value


def read_quantity(text: str) -> Quantity | None:
    r"""A number, with a percent sign, a currency before it, or a unit or nouns behind it, or None.

    Nouns are any words but those that say something else (`NOT_UNITS`), at most five.
    """
    money = _MONEY.match(text)
    if money:
        text = money["sign"] + text[money.end() :]
    match = _NUMBER.match(text)
    # "2/3" of "2/3 m", not "2"; the longest number that the text begins with.
    if match is None or (value := _value(match)) is None:
        return None
    rest = text[match.end() :].strip()
    if money:
        return Quantity(value, "$") if rest.lower() in ("", "dollars", "usd") else None
    if not rest:
        return Quantity(value)
    if re.fullmatch(r"\\?%|\\text\{\s*(?:percent|\\?%)\s*\}|percent|pct", rest):
        return Quantity(value, "%")
    unit = read_unit(
        rest, apart=re.search(r"[ \\^]", text[match.end() - 1 : match.end() + 1]) is not None
    )
    return None if unit is None else Quantity(value, unit)


def read_unit(text: str, *, apart: bool = True) -> str | None:
    """The unit in one spelling, or None if the text is none.

    Args:
        text: behind a number.
        apart: not written right at the number, where one letter may mean a magnitude or a variable.
    """
    if text.strip() == r"^\circ":
        return DEGREE_SIGN
    text = re.sub(r"\^\s*\\circ\s*([CF])\b", r"°\1", text)
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s+\^", "^", text)
    text = re.sub(r"\\mu\s*", "μ", text).replace(r"\AA", "Å")
    text = re.sub(r"\^\s*\{?\s*(-?\d)\s*\}?", r"^\1", text)
    parts = re.split(r"\s*(/|\\cdot|\*|\s)\s*", text.strip())
    if len(parts) > 13:
        return None
    names = []
    for part in parts:
        if part in ("", " ", r"\cdot", "*"):
            continue
        if part == "/":
            names.append("/")
            continue
        word, _, power = part.partition("^")
        name = _unit_name(word)
        if name is None or (not apart and len(parts) == 1 and len(word) == 1 and word not in "mg°"):
            return None
        names.append(name + (f"^{power}" if power else ""))
    if not names or names[-1] == "/" or names[0] == "/":
        return None
    for adjective, power in (("sq", "2"), ("cu", "3")):
        while adjective in names[:-1]:
            where = names.index(adjective)
            names[where : where + 2] = [f"{names[where + 1]}^{power}"]
    return " ".join(names).replace("per", "/")


def _unit_name(word: str) -> str | None:
    if word in UNITS:
        return UNITS[word]
    if not NOT_UNITS.isdisjoint(word.lower().split("-")):
        return None
    if word.lower() in UNITS and len(word) > 2:
        return UNITS[word.lower()]
    if word in ("°C", "°F", "of", "per", "old", "a", "an", "the", "in", "each"):
        return word
    if not _WORD.fullmatch(word) or len(word) < 3:
        return None
    return word.lower().removesuffix("s")


def same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """Whether an answer is the gold: the values exact, the units as `docs/grading.md` says."""
    if gold.unit == "%":
        values = (gold.value,) if answer.unit == "%" else (gold.value, gold.value / 100)
        return answer.unit in ("", "%") and answer.value in values
    if answer.unit == "%":
        below_one = gold.unit == "" and 0 < abs(gold.value) < 1
        return gold.unit == "" and answer.value == gold.value * (100 if below_one else 1)
    if answer.value != gold.value:
        return False
    if not gold.unit:
        return answer.unit != DEGREE_SIGN
    return not answer.unit or same_unit(answer.unit, gold.unit)


def same_unit(answer: str, gold: str) -> bool:
    """Equal, both degrees, or nouns with one in common: `pieces` and `pieces of candy`."""
    degrees = (DEGREE_SIGN, "degree")
    if answer == gold or (answer in degrees and gold in degrees):
        return True
    nouns = [{word for word in unit.split() if len(word) > 2} for unit in (answer, gold)]
    known = set(UNITS.values())
    return bool(nouns[0] & nouns[1] - known) and not any(word in known for word in gold.split())
