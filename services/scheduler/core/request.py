"""A request and its choices: what is known, what is computed, and which moves between states are legal.

A choice is what runs: one continuation of the prompt, with its own tokens, blocks and slot. Decides nothing.
"""

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from math import inf
from typing import Final

from services.scheduler.core.prefix_cache import ROOT, KeyChain
from shared.ids import BlockId, RequestId, SlotId
from shared.messages import FinishReason, Int32Array, ResumedChoice, TokenLogprobs
from shared.sampling import SamplingParams

_FIRST_DRAFT_SUCCESS: Final = 0.7


class ChoiceState(Enum):
    """Where a choice is in its life."""

    HELD = auto()
    """A further choice of a request whose first has not computed the prompt yet."""
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    """Waiting again, at its old place, after its blocks were taken."""
    FINISHED = auto()


_LEGAL: Final = {
    ChoiceState.HELD: {ChoiceState.WAITING, ChoiceState.FINISHED},
    ChoiceState.WAITING: {ChoiceState.RUNNING, ChoiceState.FINISHED},
    ChoiceState.RUNNING: {ChoiceState.PREEMPTED, ChoiceState.FINISHED},
    ChoiceState.PREEMPTED: {ChoiceState.RUNNING, ChoiceState.FINISHED},
    ChoiceState.FINISHED: set[ChoiceState](),
}


class IllegalTransition(Exception):
    """A move that no choice may make: a bug in the scheduler."""


class Choice:
    """One continuation of a request's prompt."""

    __slots__ = (
        "block_table",
        "cache_entry",
        "draft_success",
        "finish_reason",
        "index",
        "key_chain",
        "logprobs",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_drafts_in_flight",
        "num_in_flight",
        "num_times_gave_way",
        "num_tokens_charged",
        "num_tokens_queued",
        "num_tokens_waited",
        "output",
        "place",
        "request",
        "slot",
        "state",
        "waits_since",
    )

    def __init__(self, request: "Request", index: int) -> None:
        self.request = request
        self.index = index
        self.place: tuple[float, int, int] = (request.priority, request.arrival, index)
        """Its place among those that run: who is first goes on first and gives way last."""
        self.state = ChoiceState.WAITING if index == 0 else ChoiceState.HELD
        self.finish_reason: FinishReason | None = None
        self.output: Int32Array = array("i")
        self.logprobs: list[TokenLogprobs | None] = []
        self.num_in_flight = 0
        """Tokens that planned steps will sample, one each, and whose results have not come yet."""
        self.num_drafts_in_flight = 0
        """Guesses that these steps may make: so many tokens more may come of them."""
        self.draft_success = _FIRST_DRAFT_SUCCESS
        """How likely the next guess is right, as far as earlier ones tell."""
        self.slot: SlotId | None = None
        self.block_table: list[BlockId] = []
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in blocks once all planned steps have run, without guesses in flight."""
        self.key_chain: KeyChain | None = None
        """The keys of its full blocks, while an executor has it."""
        self.num_committed_blocks = 0
        """Leading blocks of the table that the prefix cache was told of."""
        self.cache_entry = ROOT
        """The prefix cache's entry for the last of them."""
        self.num_tokens_charged = 0
        """Its first tokens that were counted as service to its tenant, so that computing them again is not."""
        self.num_times_gave_way = 0
        """How often it was preempted for the sake of another tenant."""
        self.num_tokens_queued = 0
        """Its known tokens when it began to wait."""
        self.num_tokens_waited = 0
        """How long it has waited before, in tokens computed for others: queued, or running without getting any."""
        self.waits_since = 0
        """When it would have begun to wait had it waited without a break."""

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output so far, without what is in flight."""
        return len(self.request.prompt) + len(self.output)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that no planned step computes; below 0 if planned steps compute some that are in flight."""
        return self.num_known_tokens - self.num_computed_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that the next steps have to compute, counting those in flight; 0 if it only waits for results."""
        request = self.request
        num_output = len(self.output) + self.num_in_flight
        if num_output + self.num_drafts_in_flight >= request.max_tokens:
            return 0
        return len(request.prompt) + num_output - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state is ChoiceState.FINISHED

    @property
    def is_promoted(self) -> bool:
        """Whether it goes before everybody because it waited for too long."""
        return self.place[0] == -inf

    def promote(self) -> None:
        """Let nobody come before it any more but who was promoted earlier."""
        self.place = (-inf, self.request.arrival, self.index)

    def extend(self, token_ids: Int32Array, logprobs: Sequence[TokenLogprobs | None] = ()) -> FinishReason | None:
        """Take in more output, up to the last token that is wanted; returns why that is the last, or None if it is not.

        `logprobs` are those of the tokens, or none at all.
        """
        request, output = self.request, self.output
        request.num_losses = 0
        if request.sampling.num_logprobs is not None:
            self.logprobs += logprobs or (None,) * len(token_ids)
        for token_id in token_ids:
            output.append(token_id)
            if token_id in request.end_token_ids:
                self.cut(len(output))
                return FinishReason.STOP
            if len(output) >= request.max_tokens:
                self.cut(len(output))
                return FinishReason.LENGTH
        return None

    def resume(self, known: ResumedChoice) -> None:
        """Begin with output that the choice had elsewhere, as if it had been preempted after it."""
        request = self.request
        self.output = known.token_ids[:]
        if request.sampling.num_logprobs is not None:
            self.logprobs = list(known.logprobs) or [None] * len(self.output)
        self.finish_reason = known.finish_reason
        if self.finish_reason is None and self.output and self.output[-1] in request.end_token_ids:
            self.finish_reason = FinishReason.STOP
        elif self.finish_reason is None and len(self.output) >= request.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            self.state = ChoiceState.FINISHED
        elif self.output:
            self.state = ChoiceState.PREEMPTED

    def cut(self, num_tokens: int) -> None:
        """Forget all but the first tokens of the output."""
        del self.output[num_tokens:]
        del self.logprobs[num_tokens:]

    def known_tokens(self) -> Int32Array:
        """Prompt and output so far."""
        return self.request.prompt + self.output

    def move_to(self, state: ChoiceState) -> None:
        """Change the state. Raises IllegalTransition and changes nothing if that move is not in the table."""
        if state not in _LEGAL[self.state]:
            raise IllegalTransition(
                f"choice {self.index} of {self.request.request_id} cannot go from {self.state.name} to {state.name}"
            )
        self.state = state


class Request:
    """What a client asked for, and its choices."""

    __slots__ = (
        "_prompt_chain",
        "arrival",
        "choices",
        "end_token_ids",
        "max_tokens",
        "model",
        "num_cached_tokens",
        "num_guessed",
        "num_guessed_right",
        "num_losses",
        "priority",
        "prompt",
        "request_id",
        "salts",
        "sampling",
        "tenant",
    )

    def __init__(
        self,
        request_id: RequestId,
        prompt: Int32Array,
        sampling: SamplingParams,
        *,
        arrival: int,
        max_tokens: int,
        num_choices: int = 1,
        priority: int = 0,
        model: str = "",
        tenant: str = "",
        salts: Iterable[tuple[str, str]] = (),
        resumed: Sequence[ResumedChoice] = (),
    ) -> None:
        """`arrival` is its number in the order of arrival, `priority` is better the smaller it is, `tenant` is who its
        service is counted for, `salts` keep its blocks from requests with others, `resumed` is the output that each
        choice has already. Raises ValueError if there is nothing to compute."""
        if not prompt or max_tokens < 1 or num_choices < 1:
            raise ValueError("a request needs a prompt, at least one token to generate and at least one choice")
        if resumed and len(resumed) != num_choices:
            raise ValueError(f"{num_choices} choices cannot go on from the output of {len(resumed)}")
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.end_token_ids = frozenset(sampling.end_token_ids)
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.priority = priority
        self.model = model
        self.tenant = tenant
        self.salts = tuple(salts)
        self.num_cached_tokens = 0
        """Tokens of the prompt found in the prefix cache when it first ran."""
        self.num_losses = 0
        """Executors that died while they ran it, since its last token."""
        self.num_guessed = 0
        """Tokens that were guessed ahead for it."""
        self.num_guessed_right = 0
        self.choices = [Choice(self, index) for index in range(num_choices)]
        self._prompt_chain: tuple[int, KeyChain] | None = None
        for choice, known in zip(self.choices, resumed, strict=False):
            choice.resume(known)
        if self.choices[0].state is not ChoiceState.WAITING:  # its prompt was computed: nobody waits for that
            for choice in self.choices:
                if choice.state is ChoiceState.HELD:
                    choice.move_to(ChoiceState.WAITING)

    @property
    def max_total_tokens(self) -> int:
        """The most tokens that one of its choices can have."""
        return len(self.prompt) + self.max_tokens

    @property
    def is_finished(self) -> bool:
        """Whether all its choices are."""
        return all(choice.is_finished for choice in self.choices)

    def prompt_chain(self, block_size: int) -> KeyChain:
        """The keys of the prompt's full blocks; computed once as long as the block size stays the same."""
        if self._prompt_chain is None or self._prompt_chain[0] != block_size:
            chain = KeyChain(self.salts, block_size)
            chain.extend(self.prompt)
            self._prompt_chain = block_size, chain
        return self._prompt_chain[1]
