"""Properties (traits) of all residency policies that studies such as `baton evaluate` can name: Baton's own policies,
and the comparators, which serve only for comparison.

Does not import torch, like `generate_workers.residency.traits`. `baton_lab.comparators.residencies` creates the
policies.
"""

from collections.abc import Mapping

from generate_workers.residency import traits as product
from generate_workers.residency.traits import PolicyTraits

WINDOW = PolicyTraits("window", sizes=("budget",))
ORACLE = PolicyTraits("oracle", sizes=("budget", "alpha"))
H2O = PolicyTraits("h2o", sizes=("budget",))

POLICIES: Mapping[str, PolicyTraits] = {
    **product.POLICIES,
    **{traits.name: traits for traits in (WINDOW, ORACLE, H2O)},
}
