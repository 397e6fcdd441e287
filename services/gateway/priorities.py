"""Who may go before whom: the best priority that each tenant may ask for. The smaller a priority, the better it is.

Without a word of the operator nobody goes before the others: everybody may step back, and the default is in the middle.
"""

from collections.abc import Sequence
from typing import Final

from shared.errors import RequestError

BEST_PRIORITY: Final = -100
WORST_PRIORITY: Final = 100
_DEFAULT: Final = 0
_EVERYBODY_ELSE: Final = "*"


class NotAllowed(RequestError):
    """The key is right, but does not give the right to do this."""

    status, type, code = 403, "permission_error", "not_allowed"


def parse_priorities(pairs: Sequence[str]) -> dict[str, int]:
    """The best priority of each tenant in `tenant=priority` pairs. Raises ValueError that names one that is none."""
    priorities: dict[str, int] = {}
    for pair in pairs:
        tenant, separator, text = pair.rpartition("=")
        try:
            priority = int(text)
        except ValueError:
            priority = WORST_PRIORITY + 1
        if not (separator and tenant and BEST_PRIORITY <= priority <= WORST_PRIORITY):
            raise ValueError(
                f"best_priorities: {pair!r} is not tenant=priority with a priority from {BEST_PRIORITY} to "
                f"{WORST_PRIORITY}"
            )
        if tenant in priorities:
            raise ValueError(f"best_priorities: {tenant!r} is there twice")
        priorities[tenant] = priority
    return priorities


class Priorities:
    """What the operator lets tenants have."""

    def __init__(self, pairs: Sequence[str]) -> None:
        self._best = parse_priorities(pairs)

    def of(self, tenant: str, wanted: int | None) -> int:
        """The priority of a request: the one that its client wants, or else the default, if its tenant may have that.

        Raises NotAllowed for one that is better than the tenant's best.
        """
        best = self._best.get(tenant, self._best.get(_EVERYBODY_ELSE, _DEFAULT))
        if wanted is None:
            return max(best, _DEFAULT)
        if wanted < best:
            raise NotAllowed(
                f"priority must be at least {best} for your key, not {wanted}: smaller goes first.", param="priority"
            )
        return wanted
