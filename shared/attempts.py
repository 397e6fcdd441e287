"""The numbers of a request's attempts: whoever speaks of a higher one knows better, and no two attempts have the same.

An attempt is a submission of a request to a scheduler, or its adoption by another gateway. A gateway counts its own: 1,
2, 3 … for the one that the request came in at. One that adopts a request cannot know what others have submitted
meanwhile, nor who else is about to adopt it. So a number has three parts, the most significant first: how often the
request has been adopted, by whom, and which of that gateway's attempts it is.
"""

import zlib
from typing import Final

from shared.ids import InstanceId

FIRST: Final = 1
"""The first attempt of the gateway that a request came in at."""

_COUNT_BITS: Final = 15
_GATEWAY_BITS: Final = 28
"""Instance ids are random; two gateways that adopt one request in the same step, and share these bits, never meet."""


def after_adoption(attempt: int, gateway_id: InstanceId) -> int:
    """The attempt as which a gateway adopts a request of which it has seen `attempt`: higher than any that the gateway
    before can reach, and than any that others reach without a further adoption."""
    num_adoptions = (attempt >> (_COUNT_BITS + _GATEWAY_BITS)) + 1
    gateway = zlib.crc32(gateway_id.encode()) & ((1 << _GATEWAY_BITS) - 1)
    return ((num_adoptions << _GATEWAY_BITS) | gateway) << _COUNT_BITS
