"""What `shoal up` shows: a calm start, the address, and problems; or every event as JSON, for machines.

Owns words and colours. Decides nothing about processes.
"""

import logging
import shlex
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from shared import log as logs
from shared.cli.mesh.log_files import LogLine
from shared.cli.mesh.state import MeshState
from shared.cli.mesh.supervisor import Reporter, is_trouble
from shared.clock import Clock
from shared.ids import Service
from shared.log import without_passwords

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

_MAX_TROUBLES, _TROUBLE_WINDOW_S = 20, 10.0
"""Lines of trouble that are shown; a storm is in the log files."""

_SAME_TROUBLE_S = 2.0
"""What one process just said is not repeated for another that says the same."""


class MeshReporter(Reporter, Protocol):
    """Who is told how the mesh is."""

    def starting(self, names: Sequence[str], model: str) -> None:
        """These processes were started."""
        ...

    def up(self, name: str, after_s: float, waiting_for: Sequence[str]) -> None:
        """One of them has begun to beat; these have not."""
        ...

    def slow(self, waiting_for: Sequence[str]) -> None:
        """The start takes longer than usual, for want of these."""
        ...

    def unreachable(self, nats_url: str, after_s: float) -> None:
        """The NATS server that the mesh was told to use has not answered for so long."""
        ...

    def ready(self, state: MeshState, after_s: float) -> None:
        """A request would be served."""
        ...

    def unready(self, missing: Sequence[str]) -> None:
        """A request would no longer be served, for want of these services, if that is known."""
        ...

    def hung(self, name: str) -> None:
        """A process has been silent for too long and is ended."""
        ...

    def stop(self) -> None:
        """The mesh was told to stop."""
        ...

    def stopped(self) -> None:
        """Nothing of it is left."""
        ...


class TerminalReporter:
    """For people."""

    def __init__(self, console: "Console", clock: Clock, logs_folder: str, home: str | None = None) -> None:
        """`home`: the one that other commands have to be told too, because it is not that of the environment."""
        self._console = console
        self._clock = clock
        self._logs_folder = logs_folder
        self._home = home
        self._spinner: Status | None = None
        self._is_ready = False
        self._troubles: deque[float] = deque(maxlen=_MAX_TROUBLES)
        self._said_at: dict[str, float] = {}
        self._is_in_storm = False

    def starting(self, names: Sequence[str], model: str) -> None:
        """Name the processes; on a terminal, show that something goes on."""
        self._say(f"Starting {', '.join(names)} for {model}.")
        if self._console.is_terminal:
            self._spinner = self._console.status("waiting …")
            self._spinner.start()

    def up(self, name: str, after_s: float, waiting_for: Sequence[str]) -> None:
        """One line a process."""
        self._say(f"  {name:<16} up after {after_s:.1f} s")
        if self._spinner:
            what = ", ".join(waiting_for)
            self._spinner.update(f"waiting for {what}" if what else "waiting until a request would be served")

    def slow(self, waiting_for: Sequence[str]) -> None:
        """Only executors have a reason to be: they compile their kernels once on every machine."""
        names = [name for name in waiting_for if name.startswith(Service.EXECUTOR)]
        if names:
            self._say(f"  {', '.join(names)} may need half a minute: a first start compiles the kernels.")

    def unreachable(self, nats_url: str, after_s: float) -> None:
        """What to do about it."""
        self._say(
            f"NATS has not answered at {without_passwords(nats_url)} for {after_s:.0f} s. The mesh waits for it: start "
            f"the server, or stop with Ctrl-C and name another with --nats-url (SHOAL_NATS_URL); without one, "
            f"`shoal up` runs a server of its own.",
            style="yellow",
        )

    def ready(self, state: MeshState, after_s: float) -> None:
        """The address, and what to do with it."""
        self._quieten()
        if self._is_ready:
            self._say(f"Serving again after {after_s:.1f} s.")
            return
        self._is_ready = True
        body = f'{{"model": "{state.model}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
        which = "" if state.port == 8000 else f" --port {state.port}"
        which += f" --home {shlex.quote(self._home)}" if self._home else ""
        chat, status = f"shoal chat{which}", f"shoal status{which}"
        addresses = " and ".join((state.address, *state.other_addresses))
        self._say(f"\nShoal serves {state.model} at {addresses}  (ready in {after_s:.1f} s)\n")
        self._say(
            f"  curl -N {state.address}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n"
        )
        for command, meaning in ((chat, "talk to it"), (status, "watch it")):
            self._say(f"  {command:<44}  {meaning}")
        self._say(f"\nCtrl-C stops it. Logs are in {self._logs_folder}.")

    def unready(self, missing: Sequence[str]) -> None:
        """Why, if that is known."""
        why = f": there is no {' and no '.join(missing)}" if missing else ""
        self._say(f"Not serving at this moment{why}.", style="yellow")

    def line(self, name: str, line: LogLine, raw: str) -> None:
        """Problems only, and not a storm of them."""
        if not is_trouble(line):
            return
        now = self._clock.now()
        if now - self._said_at.get(line.text, float("-inf")) < _SAME_TROUBLE_S:
            return  # they all lose the same broker
        self._said_at[line.text] = now
        if len(self._troubles) == _MAX_TROUBLES and now - self._troubles[0] < _TROUBLE_WINDOW_S:
            if not self._is_in_storm:
                self._is_in_storm = True
                self._say(f"Many more problems; they are in {self._logs_folder}.", style="yellow")
            return
        self._is_in_storm = False
        self._troubles.append(now)
        is_error = (line.level or 0) >= logging.ERROR
        details = f"  ({line.details})" if line.details else ""
        self._say(f"{name}: {line.text}{details}", style="red" if is_error else "yellow")

    def died(self, name: str, how: str, delay_s: float) -> None:
        """It will be back."""
        again = f"in {delay_s:.1f} s" if delay_s else "now"
        self._say(f"{name} {how}; starting it again {again}.", style="yellow")

    def hung(self, name: str) -> None:
        """It will be ended."""
        self._say(f"{name} runs but says nothing any more; ending it.", style="yellow")

    def stop(self) -> None:
        """Draining takes a while."""
        self._quieten()
        self._say("\nStopping, after what is being answered; Ctrl-C again ends it at once.")

    def stopping(self, names: Sequence[str]) -> None:
        """Too much detail."""

    def killed(self, name: str, *, was_asked: bool) -> None:
        """Something may have been cut off; no news to whoever wanted it so."""
        if not was_asked:
            self._say(f"{name} did not stop in time and was killed.", style="yellow")

    def stopped(self) -> None:
        """The last word."""
        self._quieten()
        self._say("Stopped.")

    def _quieten(self) -> None:
        if self._spinner:
            self._spinner.stop()
            self._spinner = None

    def _say(self, text: str, *, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class JsonReporter:
    """For machines: each event of each process on a line of standard output, and those of `shoal up` itself."""

    def __init__(self, level: str) -> None:
        logs.configure(name="up", level=level, style="json", stream=sys.stdout)
        self._log = logging.getLogger("shared.cli.up")

    def starting(self, names: Sequence[str], model: str) -> None:
        """Logged."""
        self._log.info("starting a mesh", extra={"programs": list(names), "model": model})

    def up(self, name: str, after_s: float, waiting_for: Sequence[str]) -> None:
        """Logged."""
        self._log.info("process is up", extra={"program": name, "after_s": after_s, "waiting_for": list(waiting_for)})

    def slow(self, waiting_for: Sequence[str]) -> None:
        """Logged."""
        self._log.info("start takes longer than usual", extra={"waiting_for": list(waiting_for)})

    def unreachable(self, nats_url: str, after_s: float) -> None:
        """Logged."""
        self._log.warning("NATS does not answer", extra={"server": without_passwords(nats_url), "after_s": after_s})

    def ready(self, state: MeshState, after_s: float) -> None:
        """Logged."""
        extra = {"address": state.address, "other_addresses": list(state.other_addresses), "model": state.model}
        self._log.info("mesh is ready", extra=extra | {"after_s": after_s})

    def unready(self, missing: Sequence[str]) -> None:
        """Logged."""
        self._log.warning("mesh does not serve", extra={"missing": list(missing)})

    def line(self, name: str, line: LogLine, raw: str) -> None:
        """Events as they came; what is none becomes one."""
        if raw.startswith("{") and line.level is not None:
            print(raw, flush=True)
        else:
            self._log.log(line.level or logging.INFO, "%s", line.text, extra={"program": name})

    def died(self, name: str, how: str, delay_s: float) -> None:
        """Logged."""
        self._log.warning("process died", extra={"program": name, "how": how, "restart_in_s": delay_s})

    def hung(self, name: str) -> None:
        """Logged."""
        self._log.warning("process is silent; ending it", extra={"program": name})

    def stop(self) -> None:
        """Logged."""
        self._log.info("stopping the mesh")

    def stopping(self, names: Sequence[str]) -> None:
        """Logged."""
        self._log.info("stopping processes", extra={"programs": list(names)})

    def killed(self, name: str, *, was_asked: bool) -> None:
        """Logged."""
        level = logging.INFO if was_asked else logging.WARNING
        self._log.log(level, "process was killed", extra={"program": name, "was_asked": was_asked})

    def stopped(self) -> None:
        """Logged."""
        self._log.info("mesh stopped")
