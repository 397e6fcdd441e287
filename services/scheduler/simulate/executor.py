"""An executor that computes nothing: it takes as long as a real one would and says what the trace has it say.

Refuses plans that no executor could follow, so that a figure never comes from one.
"""

from array import array
from collections.abc import Mapping

from services.scheduler.simulate.step_times import Profile
from shared.ids import RequestId
from shared.messages import Int32Array, StepPlan, StepResult

END_TOKEN = 1 << 16
"""What ends an output; not in any trace."""


class ImpossiblePlan(Exception):
    """A plan that breaks the protocol: a bug in the scheduler."""


class _Seat:
    """A choice in a slot."""

    __slots__ = ("num_known_tokens", "num_output_tokens", "output")

    def __init__(self, output: Int32Array, num_prompt_tokens: int, num_known_tokens: int) -> None:
        self.output = output
        self.num_known_tokens = num_known_tokens
        self.num_output_tokens = num_known_tokens - num_prompt_tokens

    def sample(self, num_computed_tokens: int) -> int:
        """The next token, once all known ones are computed."""
        if num_computed_tokens != self.num_known_tokens:
            raise ImpossiblePlan(f"samples after {num_computed_tokens} tokens of {self.num_known_tokens}")
        at = self.num_output_tokens
        self.num_known_tokens += 1
        self.num_output_tokens += 1
        return self.output[at] if at < len(self.output) else END_TOKEN


class SimulatedExecutor:
    """Runs the plans of one executor, one after the other."""

    def __init__(self, profile: Profile, outputs: Mapping[RequestId, Int32Array]) -> None:
        """`outputs` are what each request's only choice will say, without the end token."""
        self._profile = profile
        self._outputs = outputs
        self._seats: dict[int, _Seat] = {}
        self._free_at_s = 0.0
        self._last_step_id = 0
        self.num_sampled_tokens = 0

    def run(self, plan: StepPlan, now_s: float) -> tuple[float, StepResult]:
        """When the plan, sent now, will have been run, and its result. Raises ImpossiblePlan."""
        if plan.step_id != self._last_step_id + 1:
            raise ImpossiblePlan(f"step {plan.step_id} after step {self._last_step_id}")
        if not 0 < sum(plan.counts) <= self._profile.capacity.max_step_tokens:
            raise ImpossiblePlan(f"step {plan.step_id} computes {sum(plan.counts)} tokens")
        self._last_step_id = plan.step_id
        for slot in plan.released:
            del self._seats[slot]
        for assigned in plan.assigned:
            if assigned.slot in self._seats:
                raise ImpossiblePlan(f"slot {assigned.slot} is taken")
            output = self._outputs[assigned.request_id]
            self._seats[assigned.slot] = _Seat(output, assigned.num_prompt_tokens, len(assigned.token_ids))
        seats, slots, starts, counts = self._seats, plan.slots, plan.starts, plan.counts
        tokens = array("i", [seats[slots[row]].sample(starts[row] + counts[row]) for row in plan.sampled_rows])
        self.num_sampled_tokens += len(tokens)
        duration_s = self._profile.step_times.seconds(plan)
        self._free_at_s = max(now_s, self._free_at_s) + duration_s
        return self._free_at_s, StepResult(plan.step_id, tokens, duration_s=duration_s)
