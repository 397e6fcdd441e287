"""Becomes another program, one that cannot outlive its parent. Started as a script, so it imports nothing of Shoal.

Owns only the moment between fork and exec, which Python code in a process with threads must not use itself.
On Linux the kernel kills the program when its parent is gone, however it went; elsewhere this is a plain exec.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_NO_PROGRAM = 127


def command(program: list[str]) -> list[str]:
    """The command that runs `program` bound to this process. Start it from the main thread, which must live on."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


def main(parent_pid: int, program: list[str]) -> None:
    """Turn this process into `program`."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(0)  # the parent died before it could be noticed
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_NO_PROGRAM)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
