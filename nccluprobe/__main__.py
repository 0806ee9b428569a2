"""``python -m nccluprobe``: the same as the ``nccluprobe`` command."""

from nccluprobe.cli.main import run

run()
