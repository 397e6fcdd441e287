"""The slots of one executor: which are free, which were freed since the last step, and how many are held by choices
that got theirs because they had waited for too long.

Those go before everybody. Under a long overload that would be everybody, and priorities would mean nothing; so no more
than half of the slots go by age. Where there is only one, every other turn does.
"""

from array import array

from services.scheduler.core.request import Choice
from shared.ids import SlotId
from shared.messages import Int32Array


class Slots:
    """Gives choices their slots and takes them back."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self._free = [SlotId(slot) for slot in reversed(range(max_slots))]
        self._freed = array("i")
        self._max_by_age = max(1, max_slots // 2)
        self._num_by_age = 0
        self._was_last_by_age = False
        self._let_past: Choice | None = None
        self._num_let_past = 0
        """How many since one had its slot by age."""

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_by_age_left(self) -> int:
        """How many more may have a slot because they waited for too long."""
        if self.max_slots == 1 and self._was_last_by_age:
            return 0
        return max(0, self._max_by_age - self._num_by_age)

    @property
    def may_let_past(self) -> bool:
        """Whether one of a better priority may go past one that has waited for too long and does not fit: as many may
        as half of the slots. Then nobody is admitted before it, so it fits some time."""
        return self._num_let_past < self._max_by_age

    def give(self, choice: Choice, *, is_overdue: bool) -> None:
        """Give a choice a slot; by age if it has waited for too long. There must be a free one."""
        goes_past = choice is self._let_past
        self._let_past = None
        if is_overdue and self.num_by_age_left and not goes_past:
            choice.promote()
        if choice.is_promoted and not goes_past:
            self._num_let_past = 0
        choice.slot = self._free.pop()
        self._was_last_by_age = choice.is_promoted
        self._num_by_age += choice.is_promoted

    def let_past(self, choice: Choice) -> None:
        """The choice that gets a slot next goes past one that has waited for too long, and not by its own age."""
        self._let_past = choice
        self._num_let_past += 1

    def promote(self, choice: Choice) -> None:
        """A choice has waited for too long although it holds a slot: let nobody come before it any more."""
        if not choice.is_promoted:
            self._num_by_age += 1
            choice.promote()

    def take_back(self, choice: Choice) -> None:
        """A choice needs its slot no longer."""
        assert choice.slot is not None
        self._free.append(choice.slot)
        self._freed.append(choice.slot)
        self._num_by_age -= choice.is_promoted
        choice.slot = None

    @property
    def freed(self) -> Int32Array:
        """Slots that lost their choice since the last step that was planned."""
        return self._freed

    def forget_freed(self) -> None:
        """A plan tells the executor of them."""
        self._freed = array("i")

    def check_invariants(self, running: list[Choice]) -> None:
        """Raise AssertionError unless each slot is free or held by one of those that run."""
        held = [choice.slot for choice in running]
        assert None not in held, "a running choice has no slot"
        assert len({*held, *self._free}) == len(held) + len(self._free) == self.max_slots, "slots"
        assert self._num_by_age == sum(choice.is_promoted for choice in running), "slots by age are counted wrongly"
