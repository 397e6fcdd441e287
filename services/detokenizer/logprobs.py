"""Log-probabilities in words: token ids become text and bytes. Does not own which ones are reported."""

from services.detokenizer.incremental import Decoding
from shared.messages import TextAlternative, TextLogprobs, TokenLogprobs


class LogprobTexts:
    """Spells tokens; what was spelt once is kept, so there are at most as many entries as tokens in the vocabulary."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._spelt: dict[int, tuple[str, bytes]] = {}

    def of(self, token_id: int, logprobs: TokenLogprobs) -> TextLogprobs:
        """The log-probabilities at one position, where `token_id` was sampled."""
        top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        return TextLogprobs(self._spell(token_id, logprobs.logprob), tuple(self._spell(i, lp) for i, lp in top))

    def _spell(self, token_id: int, logprob: float) -> TextAlternative:
        spelt = self._spelt.get(token_id)
        if spelt is None:
            utf8 = self._decoding.token_bytes(token_id)
            spelt = self._spelt[token_id] = (utf8.decode("utf-8", "replace"), utf8)
        return TextAlternative(spelt[0], logprob, spelt[1], token_id)
