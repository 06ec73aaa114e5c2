from .kl_gradients import expected_gradient as expected_gradient
from .kl_gradients import forward_kl_gradient as forward_kl_gradient
from .kl_gradients import gradient_table as gradient_table
from .kl_gradients import k3_mean as k3_mean
from .optima import ascend as ascend
from .optima import entropy_bonus_optimum as entropy_bonus_optimum
from .optima import expected_update as expected_update
from .optima import forward_kl_optimum as forward_kl_optimum
from .optima import guided_gradient as guided_gradient
from .optima import guided_optimum as guided_optimum
from .optima import per_token_optimum as per_token_optimum
from .support import from_anchor_to_optimum as from_anchor_to_optimum
from .support import literal_example as literal_example
from .support import own_guide_optimum as own_guide_optimum
from .support import search_trees as search_trees
from .support import support_condition as support_condition
from .support import train_by_sampling as train_by_sampling
from .support import tree_example as tree_example
from .support import wilson_interval as wilson_interval
from .trees import Tree as Tree
from .trees import anchor_shift as anchor_shift
from .trees import centred_guide as centred_guide
from .trees import chain_tree as chain_tree
from .trees import edge_guide as edge_guide
from .trees import fork_tree as fork_tree
from .trees import guide_table as guide_table

__all__ = [
    "Tree",
    "anchor_shift",
    "ascend",
    "centred_guide",
    "chain_tree",
    "edge_guide",
    "entropy_bonus_optimum",
    "expected_gradient",
    "expected_update",
    "fork_tree",
    "forward_kl_gradient",
    "forward_kl_optimum",
    "from_anchor_to_optimum",
    "gradient_table",
    "guide_table",
    "guided_gradient",
    "guided_optimum",
    "k3_mean",
    "literal_example",
    "own_guide_optimum",
    "per_token_optimum",
    "search_trees",
    "support_condition",
    "train_by_sampling",
    "tree_example",
    "wilson_interval",
]
