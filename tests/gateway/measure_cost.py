"""What one streamed token costs the gateway: run by hand, `python -m tests.gateway.measure_cost`, asserted nowhere.

A real gateway process on a real broker; the mesh is played by this process, one message a step for all streams, as a
detokenizer sends it. Prints the gateway's processor time per token and its memory.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from shared import subjects
from shared.cli.mesh.ports import free_port
from shared.codec import Decoder, encode
from shared.ids import InstanceId
from shared.messages import (
    ChoiceText,
    FinishReason,
    Outcome,
    RequestAccepted,
    RequestClosed,
    SubmitRequest,
    TextProduced,
    Usage,
    int32s,
)
from shared.transport.nats import NatsTransport
from tests.conftest import NatsServer
from tests.gateway.test_process import beat, start, until_status


async def measure(nats_url: str, *, num_streams: int, num_steps: int, steps_per_s: float, protocol: str) -> None:
    """One run: `num_streams` requests that all speak in each step."""
    port = free_port()
    process = start(port, SHOAL_NATS_URL=nats_url, SHOAL_LOG_LEVEL="warning")
    transport = NatsTransport(nats_url, name="measure")
    await transport.connect()
    submitted: asyncio.Queue[SubmitRequest] = asyncio.Queue()
    decoder: Decoder[SubmitRequest] = Decoder(SubmitRequest)

    async def on_message(payload: bytes, _: object) -> None:
        submitted.put_nowait(decoder.decode(payload))

    await transport.subscribe(subjects.tokenize("m"), on_message)
    url = f"http://127.0.0.1:{port}"
    await until_status(f"{url}/healthz", 200)
    await beat(transport)
    await until_status(f"{url}/readyz", 200)
    beating = asyncio.create_task(_beat_for_ever(transport))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        follow = _follow_events if protocol == "sse" else _follow_socket
        clients = [
            asyncio.create_task(follow(session, url, 1 if protocol == "sse" else num_streams))
            for _ in range(num_streams if protocol == "sse" else 1)
        ]
        requests = [await submitted.get() for _ in range(num_streams)]
        for request in requests:
            accepted = RequestAccepted(request.request_id, InstanceId("scheduler-1"), 5)
            await transport.publish(subjects.inbox(request.gateway_id), encode(accepted))
        await asyncio.sleep(0.5)
        gateway = psutil.Process(process.pid)
        before, began = gateway.cpu_times(), time.perf_counter()
        for step in range(num_steps):
            await _say(transport, requests, step)
            await asyncio.sleep(max(0.0, began + (step + 1) / steps_per_s - time.perf_counter()))
        after, memory = gateway.cpu_times(), gateway.memory_info().rss
        await _finish(transport, requests, num_steps)
        num_events = sum(await asyncio.gather(*clients))
    beating.cancel()
    user, system = after.user - before.user, after.system - before.system
    num_tokens = num_streams * num_steps
    print(
        f"{protocol} {num_streams:>4} streams {steps_per_s:>5.0f} steps/s: "
        f"{(user + system) / num_tokens * 1e6:6.1f} µs a token ({user / num_tokens * 1e6:.1f} user, "
        f"{system / num_tokens * 1e6:.1f} system), {num_events / num_tokens:.2f} events a token, {memory >> 20} MiB"
    )
    process.terminate()
    process.communicate()
    await transport.close()


async def _beat_for_ever(transport: NatsTransport) -> None:
    while True:
        await beat(transport)
        await asyncio.sleep(0.5)


async def _say(transport: NatsTransport, requests: list[SubmitRequest], step: int) -> None:
    text, token_ids, offset = f" {step % 100_000:05}", int32s([step]), step * 6
    texts = tuple(ChoiceText(request.request_id, 0, step, token_ids, offset, text) for request in requests)
    message = TextProduced(InstanceId("detokenizer-1"), texts)
    await transport.publish(subjects.inbox(requests[0].gateway_id), encode(message))


async def _finish(transport: NatsTransport, requests: list[SubmitRequest], num_steps: int) -> None:
    texts = tuple(
        ChoiceText(request.request_id, 0, num_steps, int32s(), num_steps * 6, "", FinishReason.STOP)
        for request in requests
    )
    closed = tuple(
        RequestClosed(request.request_id, Outcome.COMPLETED, Usage(5, 0, (num_steps,))) for request in requests
    )
    message = TextProduced(InstanceId("detokenizer-1"), texts, closed)
    await transport.publish(subjects.inbox(requests[0].gateway_id), encode(message))


BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


async def _follow_events(session: aiohttp.ClientSession, url: str, _: int) -> int:
    async with session.post(f"{url}/v1/chat/completions", json=BODY) as response:
        return (await response.read()).count(b"data: ")


async def _follow_socket(session: aiohttp.ClientSession, url: str, num_requests: int) -> int:
    num_frames = num_ended = 0
    async with session.ws_connect(f"{url}/v1/stream") as socket:
        for number in range(num_requests):
            await socket.send_str(json.dumps({"type": "request.create", "id": str(number), "body": BODY}))
        while num_ended < num_requests:
            frame = await socket.receive_str()
            num_frames += 1
            num_ended += '"request.completed"' in frame
    return num_frames


def main() -> None:
    """Measure both ways of delivery."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=40.0, help="steps a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            for protocol in ("sse", "websocket"):
                asyncio.run(
                    measure(
                        server.url,
                        num_streams=options.streams,
                        num_steps=options.steps,
                        steps_per_s=options.rate,
                        protocol=protocol,
                    )
                )
        finally:
            server.stop()


if __name__ == "__main__":
    main()
