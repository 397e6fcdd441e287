"""The tokenizer as an actor: prompts of its model in, tokens for a scheduler or an answer for a gateway out.

Every question gets exactly one answer. Encoding a long prompt takes milliseconds, so it is done by a thread of the
actor's own, while short ones are encoded at once and overtake it.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, assert_never

from services.tokenizer.answers import Answer, Question, num_chars, refusal, timed_answer
from services.tokenizer.encoding import PromptEncoder
from services.tokenizer.metrics import TokenizerMetrics, tokenizer_instruments
from services.tokenizer.spans import TokenizerSpans
from shared import codec, subjects
from shared.actor import Actor, Identity, Tick
from shared.clock import Clock
from shared.errors import Overloaded, TooLarge
from shared.messages import DetokenizeTokens, SubmitRequest, TokenizePrompt, TokenizerInbound, TokenizerStatus
from shared.telemetry.metrics import Instrument
from shared.telemetry.tracing import Tracing
from shared.transport import Transport

QUEUE = "tokenizers"
"""The queue group: of all tokenizers of a model, one gets each message."""

Inbound: TypeAlias = Question | Future[Answer]
"""Questions, and what the thread has done with them."""


class TokenizerService(Actor[Inbound]):
    """Encodes and decodes for one model."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        clock: Clock,
        *,
        model: str,
        encoder: PromptEncoder,
        inline_chars: int,
        max_waiting_prompts: int,
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(identity, transport, TokenizerInbound, clock)
        self._model = model
        self._encoder = encoder
        self._inline_chars = inline_chars
        self._max_waiting_prompts = max_waiting_prompts
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._metrics = TokenizerMetrics()
        self._spans = TokenizerSpans(tracing or Tracing())
        self._num_waiting = 0
        self._num_requests = 0
        self._num_tokens = 0

    async def on_start(self) -> None:
        """Take a share of the model's prompts."""
        await self.listen(subjects.tokenize(self._model), queue=QUEUE)

    async def handle(self, message: Inbound | Tick) -> None:
        """React to one message."""
        match message:
            case SubmitRequest() | TokenizePrompt() | DetokenizeTokens():
                await self._on_question(message)
            case Future():
                given = message.result()
                self._metrics.took(given.duration_s, is_inline=False)
                await self._on_answer(given)
            case Tick():
                pass
            case _:
                assert_never(message)

    def is_idle(self) -> bool:
        """Whether no prompt is with the thread."""
        return not self._num_waiting

    async def on_stop(self) -> None:
        """Let the thread go; what waits for it will be sent again by its gateway, to another tokenizer."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def status(self) -> TokenizerStatus:
        """The limit that prompts are held to, and counts so far."""
        return TokenizerStatus(self._encoder.max_model_len, self._num_requests, self._num_tokens)

    def instruments(self) -> Sequence[Instrument]:
        """Questions, tokens, and time."""
        return tokenizer_instruments(self._metrics, self.status, lambda: self._num_waiting)

    def models(self) -> tuple[str, ...]:
        """The one model whose tokenizer was loaded."""
        return (self._model,)

    async def _on_question(self, question: Question) -> None:
        self._num_requests += 1
        self._spans.began(question)
        if num_chars(question) <= self._inline_chars:
            given = timed_answer(question, self._encoder, self._model)
            self._metrics.took(given.duration_s, is_inline=True)
            await self._on_answer(given)
        elif self._num_waiting >= self._max_waiting_prompts:
            error = Overloaded(f"{self._num_waiting} long prompts wait to be encoded already", retry_after_s=1.0)
            await self._on_answer(refusal(question, error))
        else:
            self._hand_to_worker(question)

    def _hand_to_worker(self, question: Question) -> None:
        loop = asyncio.get_running_loop()

        def on_done(future: Future[Answer]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._on_worker_done, future)

        self._num_waiting += 1
        self._worker.submit(timed_answer, question, self._encoder, self._model).add_done_callback(on_done)

    def _on_worker_done(self, future: Future[Answer]) -> None:
        self._num_waiting -= 1
        self.post(future)

    async def _on_answer(self, given: Answer) -> None:
        self._num_tokens += given.num_tokens
        if not await self.send_to(given.receiver_id, given.message):
            size, limit = len(codec.encode(given.message)), self.transport.max_payload
            if size > limit:
                error = TooLarge(f"the answer takes {size} bytes, but the mesh carries {limit} bytes at most")
                given = refusal(given.question, error)
                await self.send_to(given.receiver_id, given.message)
        self._metrics.sent(given)
        self._spans.ended(given)
