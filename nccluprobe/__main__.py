"""``python -m nccluprobe`` and the ``nccluprobe`` command: where both start."""

import signal


def start() -> None:
    """Run the command; Ctrl-C waits until what it needs is imported.

    numpy's import ended by it crashed Python (measured: 1 of 150 starts, SIGSEGV).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from nccluprobe.cli.main import run

    run(before)


if __name__ == "__main__":
    start()
