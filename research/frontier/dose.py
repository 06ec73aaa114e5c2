"""The guided points of a frontier, each with its twin: what the dose is compared with."""

from research.frontier.design import point_name
from research.frontier.records import FrontierRecords
from sage_unsloth.training.algorithms import ALGORITHMS, SETTINGS


def guide_pairs(records: FrontierRecords) -> list[tuple[str, str]]:
    """Points with a guide, each with the point that has the same settings without it."""
    pairs = []
    for point, place in records.points.items():
        row = ALGORITHMS.get(place["algorithm"])
        if row is None or row.guide is None:
            continue
        settings = {name: getattr(row, name) for name in SETTINGS}
        for twin in ALGORITHMS.values():
            name = point_name(twin.name, place["setting"], place["strength"])
            same = twin.guide is None and settings == {
                setting: getattr(twin, setting) for setting in SETTINGS
            }
            if same and name in records.points:
                pairs.append((point, name))
    return pairs
