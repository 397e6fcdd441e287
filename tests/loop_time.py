"""The time of the running event loop, moved by a test that wants a timer to be due instead of waiting for it."""

import asyncio


def let_pass(seconds: float) -> None:
    """Bring all timers of the running loop nearer by `seconds`. What is due then runs after what is ready already.

    Says also what a machine that stood still for so long does to a process. `time.monotonic` does not change.
    """
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
