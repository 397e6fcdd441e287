"""Who is calling: API keys and the tenants they stand for. Owns authentication; every key may do everything."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.errors import Unauthorized
from shared.ids import DEFAULT_TENANT

KEY_PROTOCOL_PREFIX = "shoal.key."
"""A browser cannot set headers on a WebSocket, so it offers its key as a subprotocol with this prefix."""


def parse_keys(entries: Sequence[str]) -> list[tuple[str, str]]:
    """The (tenant, key) pairs of `tenant:key` entries. Raises ValueError, which never shows a key."""
    pairs = []
    for number, entry in enumerate(entries, start=1):
        tenant, colon, key = entry.partition(":")
        if not (tenant and colon and key):
            raise ValueError(f"api_keys: entry {number} is not tenant:key")
        pairs.append((tenant, key))
    if len({key for _, key in pairs}) < len(pairs):
        raise ValueError("api_keys: two entries have the same key")
    return pairs


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls."""

    tenant: str
    owner: str
    """Whose a request is: only the same key may resume it. A hash, so that no key travels through the mesh."""


class Keys:
    """The keys that open this gateway."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._pairs = [(tenant, key.encode()) for tenant, key in parse_keys(entries)]

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Whose call this is. Raises Unauthorized without a key, or with a wrong one."""
        if not self._pairs:
            return Caller(DEFAULT_TENANT, "")
        given = _given_key(headers)
        if given is None:
            raise Unauthorized("No API key was given. Send it in the header: Authorization: Bearer YOUR_KEY.")
        found = None
        for tenant, key in self._pairs:  # never stops early, so the time taken says nothing about the keys
            if hmac.compare_digest(key, given):
                found = tenant
        if found is None:
            raise Unauthorized("The API key is wrong.")
        return Caller(found, hashlib.sha256(given).hexdigest())


def _given_key(headers: Mapping[str, str]) -> bytes | None:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip().encode("utf-8", "surrogateescape")
    for offered in headers.get("Sec-WebSocket-Protocol", "").split(","):
        if offered.strip().startswith(KEY_PROTOCOL_PREFIX):
            return offered.strip().removeprefix(KEY_PROTOCOL_PREFIX).encode("utf-8", "surrogateescape")
    return None
