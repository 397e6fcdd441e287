"""The gateways that a client knows: which one to try next, and how long to wait before that.

All gateways of a mesh are equal, so a client stays with one until it fails, then turns to the next at once, and only
after a whole round without success begins to wait: up to twice as long each round, by chance, so that a thousand
clients that lost the same gateway do not come back in the same moment.
"""

import random
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 5.0


class Gateways:
    """Addresses of one mesh. Shared by all streams of a client, so that one that failed is avoided by all."""

    def __init__(self, addresses: str | Sequence[str], *, draw: random.Random | None = None) -> None:
        """Raises ValueError for what is not the address of a gateway."""
        given = [addresses] if isinstance(addresses, str) else list(addresses)
        if not given:
            raise ValueError("A client needs the address of at least one gateway.")
        self._addresses = [_normalized(address) for address in given]
        self._draw = draw or random.Random()
        self._first = 0

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def preferred(self) -> str:
        """The one to try next."""
        return self._addresses[self._first]

    def avoid(self, address: str) -> None:
        """`address` failed, or is about to leave: prefer the one after it. Nothing changes if another is preferred."""
        if address == self.preferred:
            self._first = (self._first + 1) % len(self._addresses)

    def wait_s(self, num_failures: int) -> float:
        """How long to wait before another try, after so many failures in a row."""
        num_rounds = num_failures // len(self._addresses)
        if num_rounds == 0:
            return 0.0
        return self._draw.uniform(0, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(num_rounds - 1, 16)))


def _normalized(address: str) -> str:
    url = urlsplit(address if "://" in address else f"http://{address}")
    if url.scheme not in ("http", "https") or not url.netloc or url.query or url.fragment:
        raise ValueError(f"{address!r} is not the address of a gateway, such as http://127.0.0.1:8000")
    return f"{url.scheme}://{url.netloc}{url.path.rstrip('/').removesuffix('/v1')}"
