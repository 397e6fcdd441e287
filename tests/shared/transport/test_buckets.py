"""What every bucket promises: one suite for those in memory and those in JetStream of a real server."""

import uuid
from typing import Any

import nats
import pytest
from nats.js.errors import BucketNotFoundError
from nats.js.kv import KeyValue

from shared.errors import BucketUnavailable
from shared.transport import Bucket, Transport
from shared.transport.nats import NatsTransport
from tests.conftest import NatsServer

pytestmark = pytest.mark.usefixtures("patience_with_jetstream")


@pytest.fixture
def name() -> str:
    """A bucket that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def bucket(transport: Transport, name: str) -> Bucket:
    return transport.bucket(name)


async def test_a_new_bucket_is_empty(bucket: Bucket) -> None:
    assert await bucket.entries() == {}


async def test_what_is_put_is_there_for_everybody(transport: Transport, bucket: Bucket, name: str) -> None:
    await bucket.put("a", b"1")
    await bucket.put("b-2_C", b"")
    assert await transport.bucket(name).entries() == {"a": b"1", "b-2_C": b""}


async def test_the_last_value_counts(bucket: Bucket) -> None:
    for value in (b"1", b"2", b"3"):
        await bucket.put("a", value)
    assert await bucket.entries() == {"a": b"3"}


async def test_what_is_deleted_is_gone_and_may_come_back(bucket: Bucket) -> None:
    await bucket.put("a", b"1")
    await bucket.put("b", b"2")
    await bucket.delete("a")
    await bucket.delete("never-there")
    assert await bucket.entries() == {"b": b"2"}
    await bucket.put("a", b"3")
    assert await bucket.entries() == {"a": b"3", "b": b"2"}


async def test_buckets_share_nothing(transport: Transport, bucket: Bucket, name: str) -> None:
    await bucket.put("a", b"1")
    assert await transport.bucket(f"{name}-other").entries() == {}


async def test_without_a_broker_every_call_says_so(bucket: Bucket, transport: Transport) -> None:
    await transport.close()
    for call in (bucket.entries(), bucket.put("a", b"1"), bucket.delete("a")):
        with pytest.raises(BucketUnavailable):
            await call


async def test_values_outlive_the_server(private_nats_server: NatsServer, name: str) -> None:
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="test")
    await transport.connect()
    await transport.bucket(name).put("a", b"1")
    private_nats_server.stop()
    private_nats_server.start()
    other = NatsTransport(private_nats_server.url, name="other")
    await other.connect()
    assert await other.bucket(name).entries() == {"a": b"1"}
    await transport.close()
    await other.close()


async def test_what_the_server_has_sent_is_waited_for(
    nats_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library says that this was all when nothing is left to be sent, also if nothing has come yet."""
    watch = KeyValue.watchall

    async def watch_in_haste(bucket: KeyValue) -> Any:
        watcher = await watch(bucket)
        updates: Any = watcher.updates
        is_first = True

        async def next_update(patience_s: Any) -> Any:
            nonlocal is_first
            was_first, is_first = is_first, False
            return None if was_first else await updates(patience_s)

        watcher.updates = next_update  # type: ignore[assignment, method-assign]
        return watcher

    monkeypatch.setattr(KeyValue, "watchall", watch_in_haste)
    transport = NatsTransport(nats_url, name="test")
    await transport.connect()
    await transport.bucket(name).put("a", b"1")
    await transport.bucket(name).put("b", b"2")
    assert await transport.bucket(name).entries() == {"a": b"1", "b": b"2"}
    await transport.close()


async def test_reading_and_deleting_make_no_bucket(private_nats_server: NatsServer, name: str) -> None:
    """So a mesh in which nothing is pinned leaves nothing on the server, and may do without the right to make it."""
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="test")
    await transport.connect()
    bucket = transport.bucket(name)
    assert await bucket.entries() == {}
    await bucket.delete("a")
    client = await nats.connect(private_nats_server.url)
    with pytest.raises(BucketNotFoundError):
        await client.jetstream().key_value(name)
    await bucket.put("a", b"1")
    await client.jetstream().key_value(name)
    await client.close()
    await transport.close()


async def test_a_server_without_jetstream_is_named_as_the_reason(private_nats_server: NatsServer, name: str) -> None:
    private_nats_server.has_jetstream = False
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="test")
    await transport.connect()
    with pytest.raises(BucketUnavailable, match="JetStream"):
        await transport.bucket(name).entries()
    await transport.close()
