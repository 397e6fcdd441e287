"""What each tenant was served, so that the next turn is that of whoever had least: virtual token counters.

A tenant's counter grows by the tokens computed for it, each kind with its weight, divided by the tenant's share. A
tenant that comes back after a pause starts no lower than the lowest of those that are there, or, if nobody is, than
whoever left last: a pause saves up nothing.
Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from collections.abc import Mapping
from typing import Final

PROMPT_TOKEN_WEIGHT: Final = 1.0
OUTPUT_TOKEN_WEIGHT: Final = 2.0
"""An output token takes a row of a step of its own, prompt tokens share one; the paper's weights."""

_NUM_AWAY_KEPT: Final = 1024
"""Counters of tenants that are away; of more, those are forgotten that left first."""


class FairShares:
    """The counters of all tenants. One object serves all executors of a fleet."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` gives some tenants more or less than the 1 of all others. Raises ValueError if not positive."""
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not weight > 0:
                raise ValueError(f"the weight of tenant {tenant} must be positive, not {weight}")
        self._served: dict[str, float] = {}
        self._num_open: dict[str, int] = {}
        self._away: dict[str, None] = {}
        """Those that have no open requests, in the order in which they left."""
        self._last_to_leave = 0.0
        """The counter of the tenant after which nobody was there."""

    def weight(self, tenant: str) -> float:
        """A tenant's share relative to others."""
        return self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """What a tenant that has open requests was served, in tokens of a tenant with weight 1."""
        return self._served[tenant]

    def opened(self, tenant: str) -> None:
        """One more request of this tenant is open."""
        if tenant not in self._num_open:
            self._away.pop(tenant, None)
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._lowest())
        self._num_open[tenant] = self._num_open.get(tenant, 0) + 1

    def closed(self, tenant: str) -> None:
        """One request of this tenant has ended."""
        self._num_open[tenant] -= 1
        if self._num_open[tenant]:
            return
        del self._num_open[tenant]
        self._away[tenant] = None
        if not self._num_open:
            self._last_to_leave = self._served[tenant]
        if len(self._away) > _NUM_AWAY_KEPT:
            first = next(iter(self._away))
            del self._away[first], self._served[first]

    def charge(self, tenant: str, tokens: float) -> None:
        """Count weighted tokens computed for a tenant."""
        self._served[tenant] += tokens / self.weight(tenant)

    def __len__(self) -> int:
        """How many tenants it knows of."""
        return len(self._served)

    def _lowest(self) -> float:
        return min((self._served[tenant] for tenant in self._num_open), default=self._last_to_leave)
