"""`best_of`: of the choices that were generated for a prompt, those to which the model itself gives the best odds."""

from collections.abc import Sequence

from services.gateway.streams import ChoiceLog, Stream


def returned_choices(streams: Sequence[Stream], num_choices: int) -> list[ChoiceLog]:
    """`num_choices` choices of each request, request by request: all as they are, or the best ones, best first.

    The best have the highest mean log-probability of their tokens, the one that ended them included. Choices that
    were generated to be compared have log-probabilities.
    """
    return [log for stream in streams for log in _best(stream.choices, num_choices)]


def _best(logs: Sequence[ChoiceLog], num_choices: int) -> Sequence[ChoiceLog]:
    """The sort is stable, so of equals the earlier one wins."""
    if len(logs) <= num_choices:
        return logs
    return sorted(logs, key=_mean_logprob, reverse=True)[:num_choices]


def _mean_logprob(log: ChoiceLog) -> float:
    if not log.logprobs:
        return float("-inf")
    return sum(position.chosen.logprob for position in log.logprobs) / len(log.logprobs)
