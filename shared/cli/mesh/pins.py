"""Pinning prefixes in a mesh: which tokens a system prompt becomes, and the bucket that every scheduler reads.

Owns no mesh: it talks to a tokenizer and to the broker as a service would.
"""

import asyncio
import itertools
import re
from typing import Final

from shared import subjects
from shared.codec import Decoder, encode
from shared.errors import BucketUnavailable, MessageError, OperatorError
from shared.ids import InstanceId, Service, new_request_id
from shared.messages import (
    PINS_BUCKET,
    CallFailed,
    ChatMessage,
    ChatPrompt,
    Int32Array,
    PinnedPrefix,
    PinsChanged,
    Prompt,
    PromptTokenized,
    TextPrompt,
    TokenizePrompt,
)
from shared.transport import Transport

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_TIMEOUT_S: Final = 5.0
_REPLIES_TO: Final = "cli"

Reply = PromptTokenized | CallFailed


def check_pin_name(name: str) -> str:
    """The name itself. Raises OperatorError unless it can be a pin's."""
    if not _NAME.fullmatch(name):
        raise OperatorError(
            f"{name!r} cannot name a pin: a name is 1 to 64 letters, digits, '-' and '_', and begins with "
            f"a letter or digit"
        )
    return name


class MeshPins:
    """What is pinned in the mesh behind a transport. Every call may raise OperatorError."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._bucket = transport.bucket(PINS_BUCKET)
        self._decoder: Decoder[PinnedPrefix] = Decoder(PinnedPrefix)

    async def all(self) -> dict[str, PinnedPrefix]:
        """Every pin by name."""
        try:
            raw = await self._bucket.entries()
            return {name: self._decoder.decode(payload) for name, payload in sorted(raw.items())}
        except (BucketUnavailable, MessageError) as error:
            raise OperatorError(f"the pins cannot be read: {error}") from error

    async def put(self, name: str, prefix: PinnedPrefix) -> None:
        """Pin a prefix, instead of what had this name."""
        payload = encode(prefix)
        size, limit = len(payload), self._transport.max_payload
        if size > limit:
            raise OperatorError(f"{len(prefix.token_ids)} tokens take {size} bytes, but the mesh carries {limit}")
        try:
            await self._bucket.put(name, payload)
        except BucketUnavailable as error:
            raise OperatorError(f"{name} cannot be pinned: {error}") from error
        await self._tell(name)

    async def delete(self, name: str) -> None:
        """Unpin a prefix."""
        pins = await self.all()
        if name not in pins:
            raise OperatorError(f"nothing is pinned as {name!r}; there is {', '.join(pins) or 'no pin at all'}")
        try:
            await self._bucket.delete(name)
        except BucketUnavailable as error:
            raise OperatorError(f"{name} cannot be unpinned: {error}") from error
        await self._tell(name)

    async def system_prompt_tokens(self, model: str, system: str) -> Int32Array:
        """The tokens with which every chat begins that has this system prompt."""
        chats = [
            ChatPrompt((ChatMessage("system", system), ChatMessage("user", first_word))) for first_word in ("A", "7")
        ]
        first, second = await asyncio.gather(*(self._tokenize(model, chat) for chat in chats))
        num_same = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        )
        return first[:num_same]

    async def text_tokens(self, model: str, text: str) -> Int32Array:
        """The tokens of a text as the beginning of a completion's prompt; without the last, which may grow."""
        return (await self._tokenize(model, TextPrompt(text)))[:-1]

    async def _tokenize(self, model: str, prompt: Prompt) -> Int32Array:
        """Ask any tokenizer of the model, as a gateway does."""
        call_id = new_request_id()
        asker = InstanceId(f"{_REPLIES_TO}-{call_id}")
        replies: asyncio.Queue[Reply] = asyncio.Queue()
        decoder: Decoder[Reply] = Decoder(Reply)

        async def on_reply(payload: bytes, _headers: object) -> None:
            replies.put_nowait(decoder.decode(payload))

        subscription = await self._transport.subscribe(subjects.inbox(asker), on_reply)
        try:
            question = TokenizePrompt(call_id, asker, model, prompt)
            await self._transport.publish(subjects.tokenize(model), encode(question))
            reply = await asyncio.wait_for(replies.get(), _TIMEOUT_S)
        except TimeoutError:
            raise OperatorError(f"no {Service.TOKENIZER} of {model} has answered within {_TIMEOUT_S:.0f} s") from None
        finally:
            await subscription.unsubscribe()
        if isinstance(reply, CallFailed):
            raise OperatorError(f"the prompt cannot be tokenized: {reply.error.message}")
        return reply.token_ids

    async def _tell(self, name: str) -> None:
        await self._transport.publish(subjects.PINS, encode(PinsChanged(name)))
