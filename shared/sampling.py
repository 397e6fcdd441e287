"""How the next token of a choice is drawn: parameters, and the one random number that a draw uses.

The noise of a draw is a function of (seed, choice index, output position) alone. A request therefore gives the same
tokens by itself, in any batch, after preemption, and on another executor.
"""

from typing import Final

import msgspec

MAX_LOGPROBS: Final = 20
"""The most alternatives a client may ask for at each position (OpenAI's limit)."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """What shapes the distribution of one choice's next token.

    Applied in this order: `logit_bias`, suppression of `end_token_ids` before `min_tokens`, repetition, frequency and
    presence penalties, temperature, then `top_k`, `top_p` and `min_p`. A temperature of 0 means greedy.
    Log-probabilities are those of the model itself, before any of this.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities first sum to `top_p`."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output so far."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    """No end token before this many output tokens."""
    end_token_ids: tuple[int, ...] = ()
    """The tokens that end this choice: the model's own unless the client ignores them, and the client's."""
    num_logprobs: int | None = None
    """How many alternatives to report at each position beside the token itself; None reports nothing."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


_MASK64: Final = (1 << 64) - 1


def _mix(x: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers whose output bits all depend on all input bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def uniform(seed: int, choice_index: int, position: int) -> float:
    """The random number in [0, 1) that draws output token number `position` of a choice.

    Three rounds of SplitMix64 over the arguments; the top 53 bits become the fraction.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    return (_mix(_mix(_mix(seed) ^ choice_index) ^ position) >> 11) * 2.0**-53
