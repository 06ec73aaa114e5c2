"""Units, counted things and number words: everything that may follow a number.

Any other word is not a unit. (Words of the problem's own text are removed before an answer is read:
`mathematics.counted_words`.) A unit has an exact size in the base unit of its dimension, so `2.5
hours` is `2 hours 30 minutes`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

PERCENT, ANGLE = "%", "angle"


def split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# dimension: name = size in the dimension's first unit, and other spellings; a bare "=" is 1.
_TABLE = """
length: m= meter meters metre metres | cm=1/100 centimeter centimeters centimetre centimetres
  cms | mm=1/1000 millimeter millimeters millimetre millimetres | dm=1/10 decimeter decimeters
  decimetre | km=1000 kilometer kilometers kilometre kilometres kms | nm=1/1000000000 nanometer
  nanometers | picometer=1/1000000000000 picometers | μm=1/1000000 micrometer micrometers micron
  microns | Å=1/10000000000 angstrom angstroms | in=127/5000 inch inches ins | ft=381/1250 foot
  feet | yd=1143/1250 yard yards yds | mi=201168/125 mile miles | hectometers=100 |
  decameters=10
astronomical: pc= parsec parsecs | kpc=1000 | Mpc=1000000
lightyears: ly= lightyear lightyears
sun distances: AU=
time: s= sec secs second seconds | ms=1/1000 msec millisecond milliseconds | min=60 minute
  minutes mins | μs=1/1000000 microsecond microseconds | ns=1/1000000000 nanosecond nanoseconds
  | h=3600 hr hrs hour hours | day=86400 days | week=604800 weeks wk wks | fortnights=1209600
  fortnight
years: year= years yr yrs | month=1/12 months mo | decade=10 decades | century=100 centuries
mass: g= gram grams gm gms | kg=1000 kilogram kilograms kgs | mg=1/1000 milligram milligrams |
  μg=1/1000000 microgram micrograms | lb=45359237/100000 lbs pound pounds | oz=45359237/1600000
  ounce ounces | tonne=1000000 tonnes | ton=90718474/100 tons
volume: L= l liter liters litre litres | mL=1/1000 ml milliliter milliliters millilitre cc |
  gallon=473176473/125000000 gallons gal | quart=473176473/500000000 quarts qt |
  pint=473176473/1000000000 pints pt | cup=473176473/2000000000 cups | cL=1/100 cl
$: $= dollar dollars usd USD bucks buck | ¢=1/100 cent cents
€: €= euro euros eur EUR
£: £= GBP gbp
¥: ¥= yen JPY yuan CNY
₹: ₹= rupee rupees INR rs Rs
peso: peso= pesos
angle: degree= degrees deg degs °
radian: rad= radian radians
arc: arcmin= arcminute arcminutes | arcsec=1/60 arcsecond arcseconds arcsecs
temperature: K= kelvin kelvins
celsius: °C= celsius Celsius centigrade
fahrenheit: °F= fahrenheit Fahrenheit
energy: J= joule joules | kJ=1000 kilojoule kilojoules | MJ=1000000 | mJ=1/1000
electron energy: eV= electronvolt electronvolts | keV=1000 | MeV=1000000 | GeV=1000000000
%: %= percent pct
heat: cal= calorie calories | kcal=1000 Calories
erg: erg= ergs
force: N= newton newtons | kN=1000
pressure: Pa= pascal pascals | kPa=1000 | MPa=1000000 | GPa=1000000000
atm: atm= atmospheres
torr: torr= mmHg
power: W= watt watts | kW=1000 kilowatt kilowatts | MW=1000000 megawatts | mW=1/1000
voltage: V= volt volts | kV=1000 | mV=1/1000
current: A= amp amps ampere amperes | mA=1/1000
charge: C= coulomb coulombs | μC=1/1000000 | nC=1/1000000000
capacitance: F= farad farads | μF=1/1000000 | pF=1/1000000000000
resistance: Ω= ohm ohms | kΩ=1000
inductance: H= henry henries
field: T= tesla teslas
frequency: Hz= hertz | kHz=1000 | MHz=1000000 | GHz=1000000000 | rpm=1/60
amount: mol= mole moles | mmol=1/1000
amu: amu=
data: byte= bytes | KB=1000 kilobytes | MB=1000000 megabytes megabyte | GB=1000000000 gigabytes
  | TB=1000000000000
bit: bit= bits | Mbps=
level: dB= decibel decibels
area: acre= acres | hectare=61776/25000 hectares ha
"""
_COUNTED = split_words("""
    apple orange banana pear peach plum lemon lime mango grape cherry strawberry blueberry
    raspberry berry watermelon melon pineapple coconut avocado tomato potato carrot onion
    cucumber pepper pumpkin vegetable fruit nut peanut almond walnut acorn egg cookie cake
    cupcake muffin brownie donut doughnut pie pizza sandwich burger hamburger hotdog taco bagel
    pretzel cracker chip candy candie lollipop chocolate marshmallow gumball popsicle meatball
    sausage pancake waffle loaf loave slice piece serving meal snack dish drink bottle can jar
    box bag basket bucket bowl cup glass plate tray carton crate barrel package packet pack
    container case tin tub tube spoon fork knife tablespoon teaspoon scoop tile brick block log
    stick branch leaf leave petal flower rose tulip daisy sunflower lily plant seed bean tree
    bush cat dog kitten puppy bird chicken hen duck goose cow pig sheep goat horse rabbit bunny
    hamster mouse mice rat frog toad turtle fish goldfish crab shark whale dolphin penguin
    seagull lion tiger bear elephant monkey kangaroo panda snake spider ant bee bug insect
    butterfly beetle cricket animal pet feather wing leg arm eye tooth teeth finger hand head
    hair boy girl kid child children man men woman women people person adult student pupil
    teacher classmate friend guest visitor customer client employee worker member player
    passenger resident patient neighbor sibling brother sister son daughter cousin grandchild
    grandchildren baby babie lady ladie gentleman soldier sailor senior freshman team class
    classe family familie group crew club company companie school grade subject lesson test quiz
    question problem exam essay book notebook page chapter word letter sentence paragraph line
    magazine newspaper novel story storie article poem song album movie video episode show game
    match puzzle toy doll ball balloon kite marble bead button card sticker stamp coin penny
    pennie nickel dime bill ticket coupon dollar pen pencil crayon marker eraser ruler paper
    sheet folder envelope photo photograph picture painting poster drawing frame shirt dress
    skirt sock shoe boot hat cap coat jacket sweater scarf glove towel blanket pillow quilt bed
    chair table desk sofa lamp bulb candle window door room floor wall house home apartment
    building store shop office hotel garden farm field park pool street road bridge station stop
    seat row column shelf shelve car truck bus buse van bike bicycle motorcycle train plane
    airplane boat ship rocket wheel tire engine trip flight ride lap mile step stair round turn
    throw shot goal run win loss point vote call text message email post view like follower hour
    way time visit job task order sale delivery deliverie shift day night morning weekday
    weekend item object thing unit part section number integer digit prime factor divisor
    multiple solution root value term element subset function triangle square rectangle circle
    polygon side edge vertex vertice vertices face corner diagonal angle intersection path route
    pattern arrangement combination permutation outcome choice option color colour shape cube
    sphere shell seashell stone rock pebble gem jewel diamond ring necklace bracelet crystal
    star planet moon cloud snowflake snowball machine computer phone laptop battery batterie
    device tool nail screw bolt wire rope string ribbon gift present party widget sample cell
    chromosome gene atom electron proton neutron photon molecule particle bond isomer valence
    layer node level state mode degree bit byte query comparison operation iteration cycle swap
    move
""")
# These are also functions or terms of mathematics.
_SKIP = split_words("prime hat log loss multiple root factor cube square power")
NOUNS = _COUNTED - _SKIP
FILLERS = split_words("""
    total left each altogether remaining old different distinct possible real positive only tall
    long wide deep high all
""")
JOINS = frozenset(("and", "of", "per", "a", "an", "the", "every"))


LABELS = split_words("""
    area perimeter circumference volume surface length width height depth radius diameter
    distance displacement base side hypotenuse angle slope intercept total sum difference
    product quotient remainder average mean median mode range variance deviation probability
    odds ratio percent percentage rate speed velocity acceleration time duration age weight mass
    force energy work power pressure density temperature cost price profit loss revenue interest
    tax discount tip salary income change money amount number count value max maximum min
    minimum answer result solution score determinant det rank trace discriminant period
    frequency amplitude wavelength the of
""")
"""Words that may name a number before "=" or ":"."""


@dataclass(frozen=True)
class Unit:
    """The unit of a number.

    Attributes:
        powers: (dimension, exponent), sorted; each noun is its own dimension.
        size: of one such unit in base units.
        nouns: the words that are not physical units.
    """

    powers: tuple[tuple[str, int], ...] = ()
    size: Fraction = Fraction(1)
    nouns: frozenset[str] = frozenset()


def _table() -> dict[str, tuple[str, Fraction]]:
    units: dict[str, tuple[str, Fraction]] = {}
    for row in _TABLE.replace("\n  ", " ").strip().split("\n"):
        dimension, _, entries = row.partition(": ")
        for entry in entries.split("|"):
            first, *others = entry.split()
            name, _, size = first.partition("=")
            for spelling in (name, *others):
                units[spelling] = (dimension, Fraction(size or 1))
    return units


UNITS = _table()
RATES = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmph": ("km", "h"), "kmh": ("km", "h")}
"""Units that are a rate: unit and unit of time."""
GLUED = split_words("m g h L V W N J")
"""Units of one letter that may follow a number without a space."""


def unit_of_word(word: str) -> tuple[str, Fraction] | None:
    """(dimension, size) of one word, or None if it is neither a unit nor a counted thing."""
    if word in UNITS:
        return UNITS[word]
    lower = word.lower()
    # Case matters in short units: mW and MW.
    if len(word) > 2 and lower in UNITS:
        return UNITS[lower]
    for noun in (lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if noun in NOUNS:
            return f"noun {noun}", Fraction(1)
    return None


# --- number words ---------------------------------------------------------------------------------

_NUMERALS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen
"""
_ONES = _NUMERALS.split()
_SMALL = {word: value for value, word in enumerate(_ONES)} | {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70,
    "eighty": 80, "ninety": 90,
}  # fmt: skip
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6,
    "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10,
}  # fmt: skip


def number_in_words(words: str) -> Fraction | None:
    """The value of English number words, `twenty-one`, `two thirds`; None for other words."""
    parts = [part for part in re.split(r"[\s-]+", words.lower().strip()) if part != "and"]
    if not parts or len(parts) > 12:
        return None
    if parts == ["half"]:
        return Fraction(1, 2)
    if parts[0] == "a" and len(parts) == 2 and parts[1] in SCALES:
        parts[0] = "one"
    if len(parts) == 2 and parts[0] in (*_ONES[1:], "a"):
        share = _PARTS.get(parts[1]) or _PARTS.get(parts[1].removesuffix("s"))
        if share:
            return Fraction(_SMALL.get(parts[0], 1), share)
    total = group = 0
    last = last_scale = 10**15  # each part must be smaller: hundreds, then tens, then ones
    for part in parts:
        if part in _SMALL:
            value = _SMALL[part]
            size = 10 if value >= 20 else 1
            teen = 10 <= value < 20
            if last <= size or (teen and last < 100) or (value == 0 and len(parts) > 1):
                return None
            group, last = group + value, size
        elif part == "hundred" and 0 < group < 10:
            group, last = group * 100, 100
        elif part in SCALES and part != "hundred" and group:
            if total and SCALES[part] >= last_scale:
                return None
            total, group, last, last_scale = total + group * SCALES[part], 0, 10**15, SCALES[part]
        else:
            return None
    return Fraction(total + group)
