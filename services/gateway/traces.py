"""`GET /v1/requests/{id}/trace`: where a request's time went, from what every instance of the mesh knows of it.

Owns who may look. How instances are asked is with `shared.telemetry.asking`, how it is told with its `timeline`.
"""

from collections.abc import Mapping
from typing import Final

from services.gateway.mesh import Mesh
from shared.errors import Disconnected, InvalidRequest, MessageError, NotFound, Unavailable, UnsupportedField
from shared.ids import RequestId, Service
from shared.telemetry.asking import Answers, Asking
from shared.telemetry.timeline import Timeline, timeline_of

_MAX_ID_CHARS: Final = 128
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}


def wants_steps(query: Mapping[str, str]) -> bool:
    """Whether each step is asked for. Raises InvalidRequest for a query that makes no sense."""
    for name in query:
        if name != "steps":
            raise UnsupportedField(f"{name[:100]} is an unknown parameter.", param=name[:100])
    text = query.get("steps", "false")
    if text not in _BOOLEANS:
        raise InvalidRequest("steps must be true or false.", param="steps")
    return _BOOLEANS[text]


class Traces:
    """Looks requests up."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._asking = Asking(mesh.gateway_id, mesh.transport)

    async def start(self) -> None:
        """Be ready to ask."""
        await self._asking.start()

    async def look_up(self, request_id: str, owner: str, *, with_steps: bool) -> Timeline:
        """What is known of a client request of this owner.

        Raises NotFound for one that is unknown, of another owner, or forgotten; Overloaded if many are looked up, and
        Unavailable without the broker.
        """
        if len(request_id) > _MAX_ID_CHARS:
            raise _unknown()
        alive = [beat.instance_id for service in Service for beat in self._mesh.directory.alive(service)]
        try:
            answers = await self._asking.ask(RequestId(request_id), alive)
        except Disconnected as error:
            raise Unavailable("This gateway has lost its message broker.", retry_after_s=1.0) from error
        except MessageError:  # the id is no text that could be sent
            raise _unknown() from None
        timeline = timeline_of(RequestId(request_id), answers, with_steps=with_steps)
        if timeline is None or not self._may_look(RequestId(request_id), owner, answers):
            raise _unknown()
        return timeline

    def _may_look(self, request_id: RequestId, owner: str, answers: Answers) -> bool:
        """Whether a request is known to be this owner's. Where there are no keys it is everybody's."""
        owners = {found.owner for found in answers.found} | {self._mesh.spans.owner_of(request_id)}
        known = owners - {None}
        return known == {owner} or (not owner and not known)


def _unknown() -> NotFound:
    return NotFound("There is no such request, or nothing is known of it any more.", param="request_id")
