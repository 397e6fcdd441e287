"""Getting messages from one process to another: a protocol, over NATS and in memory."""

from shared.transport.bucket import Bucket
from shared.transport.ledger import Ledger
from shared.transport.protocol import Handler, Subscription, Traffic, Transport

__all__ = ["Bucket", "Handler", "Ledger", "Subscription", "Traffic", "Transport"]
