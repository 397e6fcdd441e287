"""What waits for a broker comes out as it went in, and takes no more than its room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Disconnected
from shared.transport.unsent import Unsendable, Unsent

messages = st.tuples(
    st.text("ab.", min_size=1, max_size=5),
    st.binary(max_size=40),
    st.none() | st.dictionaries(st.text("xy", min_size=1, max_size=3), st.text("z", max_size=9), max_size=2),
)


@given(st.lists(messages | st.none(), max_size=60))
def test_the_oldest_comes_first_and_its_room_is_free_again(
    steps: list[Unsendable | None],
) -> None:
    unsent = Unsent(100)
    expected: list[Unsendable] = []
    for step in steps:
        if step is not None:
            try:
                unsent.add(*step)
            except Disconnected:
                assert expected, "whatever fits is taken when nothing waits"
            else:
                expected.append(step)
        elif expected:
            assert unsent.oldest == expected.pop(0)
            unsent.remove()
        assert len(unsent) == len(expected)
    while expected:
        assert unsent.oldest == expected.pop(0)
        unsent.remove()
    unsent.add("", bytes(100), None)


def test_what_does_not_fit_is_refused_and_leaves_the_room_to_others() -> None:
    unsent = Unsent(10)
    unsent.add("a", bytes(5), None)
    with pytest.raises(Disconnected):
        unsent.add("a", bytes(4), None)
    unsent.add("a", bytes(3), None)
    unsent.clear()
    assert len(unsent) == 0
    unsent.add("a", bytes(9), None)
