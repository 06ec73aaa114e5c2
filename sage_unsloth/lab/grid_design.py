"""What a grid trains: thresholds × ratios of the Branch guide over seeds, and the runs' folders."""

from dataclasses import dataclass

from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.quickstart import QuickstartConfig

THRESHOLDS = (0.8, 1.2, 2.0)
RATIOS = (0.1, 0.3, 0.5)


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """What is trained.

    Attributes:
        thresholds: of the Branch guide, nats.
        ratios: per nat, > 0; plain GRPO runs beside them.
        seeds: training seeds of every cell.
        floor_seeds: training seeds of plain GRPO, those of the cells first; two or more show the
            noise.
        run: settings of SFT, RL and evaluation, as in the quickstart; the RL seed is the cell's.

    Raises:
        ValueError: no cells, one named twice, a ratio that is not > 0, or GRPO without one of the
            cells' seeds.
    """

    thresholds: tuple[float, ...] = THRESHOLDS
    ratios: tuple[float, ...] = RATIOS
    seeds: tuple[int, ...] = (3407,)
    floor_seeds: tuple[int, ...] = (3407, 3408, 3409)
    run: QuickstartConfig

    def __post_init__(self) -> None:
        for name in ("thresholds", "ratios", "seeds", "floor_seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different values, at least one; got {values}")
        if min(self.ratios) <= 0:
            raise ValueError(
                "ratios must be > 0, since a ratio of 0 is plain GRPO and always runs; got "
                f"{self.ratios}"
            )
        if not set(self.seeds) <= set(self.floor_seeds):
            raise ValueError(
                "plain GRPO must run with every seed of the cells, because they are compared; got "
                f"seeds={self.seeds} and floor_seeds={self.floor_seeds}"
            )
        for threshold, ratio in self.cells():
            BranchGuide(threshold=threshold, ratio=ratio)  # checks both

    def cells(self) -> list[tuple[float, float]]:
        return [(threshold, ratio) for threshold in self.thresholds for ratio in self.ratios]

    def runs(self) -> dict[str, tuple[BranchGuide, int]]:
        """Folder -> guide and seed, plain GRPO first."""
        runs = {floor_folder(seed): (BranchGuide(ratio=0.0), seed) for seed in self.floor_seeds}
        for seed in self.seeds:
            for threshold, ratio in self.cells():
                guide = BranchGuide(threshold=threshold, ratio=ratio)
                runs[cell_folder(threshold, ratio, seed)] = (guide, seed)
        return runs


def cell_folder(threshold: float, ratio: float, seed: int) -> str:
    return f"threshold-{threshold:g}_ratio-{ratio:g}_seed-{seed}"


def floor_folder(seed: int) -> str:
    return f"grpo_seed-{seed}"
