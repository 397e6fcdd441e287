"""Which models there are, whether one can be served, and by which scheduler. Knows it from presence alone.

When one scheduler drains, or has died, and another is about to take its executors, a model counts as served in between:
requests wait for that moment.
"""

import math
from collections import Counter
from collections.abc import Sequence

from shared.clock import Clock
from shared.errors import ModelNotFound, Unavailable
from shared.ids import SERVING, InstanceId, Service
from shared.messages import Presence, SchedulerStatus, TokenizerStatus
from shared.presence import DEAD_AFTER_S, Directory

_REMEMBERED_S = 60.0
"""So long after its last instance vanished a model is unavailable rather than unknown."""
_RETRY_AFTER_S = 1.0
_CHANGES_HANDS_S = 5.0
"""Executors that no scheduler has taken for so long will not be taken soon. Usually it takes a small part of a second;
after the death of a scheduler, as long as its executors need to notice."""


class Admission:
    """Decides about one request at a time, from the beats of the others."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._began_at = clock.now()
        self._last_named: dict[str, float] = {}
        self._last_complete: dict[str, float] = {}
        """When each model last lacked nothing."""
        self._num_given: Counter[InstanceId] = Counter()
        """Requests given to each scheduler since its last beat, which its own counts cannot show yet."""

    def observe(self, beat: Presence) -> None:
        """Take note of a beat that the directory has seen."""
        for model in beat.models:
            self._last_named[model] = self._clock.now()
        self._num_given.pop(beat.instance_id, None)

    def tick(self) -> None:
        """Look which models lack nothing, and drop those that nobody has named for a while. Call it now and then."""
        now = self._clock.now()
        self._last_named = {model: at for model, at in self._last_named.items() if at >= now - _REMEMBERED_S}
        self._last_complete = {model: at for model, at in self._last_complete.items() if model in self._last_named}
        for model in self._last_named:
            self._missing_now(model, SERVING)

    def models(self) -> list[str]:
        """The models that any instance names, in order."""
        instances = (beat for service in SERVING for beat in self._directory.alive(service))
        return sorted({model for beat in instances for model in beat.models})

    def known_models(self) -> list[str]:
        """These, and those whose last instance vanished within the last minute, in order."""
        return sorted({*self.models(), *self._last_named})

    def max_model_len(self, model: str) -> int | None:
        """Tokens of prompt and output that a request to `model` may have, if a tokenizer has said so."""
        for beat in self._directory.alive(Service.TOKENIZER, model):
            if isinstance(beat.status, TokenizerStatus):
                return beat.status.max_model_len
        return None

    def num_available(self, model: str) -> dict[Service, int]:
        """How many instances of each needed service take work for `model`."""
        return self._directory.num_available(model)

    def missing(self, model: str, needed: Sequence[Service] = SERVING) -> list[Service]:
        """The services among `needed` of which no instance takes work for `model`, and none is about to."""
        missing = self._missing_now(model, needed)
        return [] if missing == [Service.EXECUTOR] and self._changes_hands(model) else missing

    def check_model(self, model: str, needed: Sequence[Service] = SERVING) -> None:
        """Raises ModelNotFound for a model that nobody names, and Unavailable for one that lacks a needed service.

        Until it has listened for as long as everybody needs to speak, a gateway has only just started and cannot know.
        """
        if missing := self.missing(model, needed):
            if model not in self._last_named:
                if self._clock.now() - self._began_at < DEAD_AFTER_S:
                    raise Unavailable("This gateway has only just started.", retry_after_s=_RETRY_AFTER_S)
                raise ModelNotFound(f"There is no model {_shown(model)} here.", param="model")
            names = " and no ".join(missing)
            raise Unavailable(f"The model {_shown(model)} has no {names} now.", retry_after_s=_RETRY_AFTER_S)

    def choose_scheduler(self, model: str, num_requests: int = 1) -> InstanceId | None:
        """The scheduler to give `num_requests` to: the one with the fewest, counting those given since it last spoke.

        None if none takes work for `model` at this moment.
        """
        schedulers = self._directory.available(Service.SCHEDULER, model)
        if not schedulers:
            return None
        chosen = min(schedulers, key=lambda beat: (self._load(beat), beat.instance_id)).instance_id
        self._num_given[chosen] += num_requests
        return chosen

    def _missing_now(self, model: str, needed: Sequence[Service]) -> list[Service]:
        counts = self._directory.num_available(model)
        if all(counts.values()):
            self._last_complete[model] = self._clock.now()
        return [service for service in needed if not counts[service]]

    def _changes_hands(self, model: str) -> bool:
        """Whether executors of a model are there that no scheduler has taken yet, and its last one had a moment ago."""
        is_recent = self._clock.now() - self._last_complete.get(model, -math.inf) < _CHANGES_HANDS_S
        return is_recent and bool(self._directory.available(Service.EXECUTOR, model))

    def _load(self, beat: Presence) -> int:
        reported = beat.status.num_waiting + beat.status.num_running if isinstance(beat.status, SchedulerStatus) else 0
        return reported + self._num_given[beat.instance_id]


def _shown(model: str) -> str:
    return repr(model if len(model) <= 100 else model[:100] + "…")
