"""``nccluprobe canary``: exercise NCCL between these GPUs, check results, plant faults."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nccluprobe.cli.numbers import seconds, whole
from nccluprobe.cli.output import say
from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.plural import counted

DEFAULT_DEADLINE = 30.0
#: Steps of a run with a planted fault.
DEFAULT_STEPS = 200
#: The stand-ins move every byte on the CPU.
DEFAULT_SIZES, DEFAULT_SIM_SIZES = "8,64K,16M", "8,4K,64K"
DEFAULT_SIM_RANKS = 2


def canary(
    ops: Annotated[str, typer.Option("--ops", help="Operations, with commas, or all.")] = "all",
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            help=f"Bytes per rank, with commas. Default: {DEFAULT_SIZES}; "
            f"{DEFAULT_SIM_SIZES} with --sim.",
        ),
    ] = None,
    dtypes: Annotated[
        str, typer.Option("--dtypes", help="Datatypes, with commas, or all.")
    ] = "float32",
    redops: Annotated[str, typer.Option("--redops", help="Reductions, or all.")] = "sum",
    iters: Annotated[
        int,
        typer.Option(
            "--iters",
            parser=whole(1, 1_000_000),
            metavar="N",
            help="Measured calls of each kind.",
        ),
    ] = 20,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", parser=whole(1, 1024), metavar="N", help="Start so many local ranks."
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", parser=whole(), metavar="R", help="This process's rank."),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option("--world", parser=whole(1), metavar="N", help="Number of ranks."),
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="HOST:PORT where rank 0 listens.")
    ] = None,
    sim: Annotated[
        bool, typer.Option("--sim", help="Use the stand-ins for NCCL and the driver: no GPU.")
    ] = False,
    nccl: Annotated[Path | None, typer.Option("--nccl", help="This copy of NCCL.")] = None,
    cuda: Annotated[Path | None, typer.Option("--cuda", help="This CUDA driver.")] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            parser=seconds(0.1),
            metavar="SECONDS",
            help="For one operation. Default: 30; none with --inject.",
        ),
    ] = None,
    hold: Annotated[
        float | None,
        typer.Option(
            "--hold",
            parser=seconds(),
            metavar="SECONDS",
            help="With --nproc: end ranks so long after their start.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            parser=whole(1),
            metavar="N",
            help="Do so many steps of all operations, do not measure.",
        ),
    ] = None,
    pause: Annotated[
        float,
        typer.Option("--pause", parser=seconds(), metavar="SECONDS", help="Before each step."),
    ] = 0.0,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="An inference group: ranks wait idle for rank 0's requests."),
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(
            "--every",
            parser=seconds(),
            metavar="SECONDS",
            help="With --serve: a request every so many seconds.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", parser=whole(1), metavar="N", help="With --serve: end after so many."
        ),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option("--inject", help="Plant a fault: KIND:rank=R,at=N. May be repeated."),
    ] = None,
    truth: Annotated[
        Path | None, typer.Option("--truth", help="Append the truth of faults to this file.")
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Log the libraries, NCCL's variables and every retry."),
    ] = False,
) -> int:
    """Exercise NCCL: check every result, time it, say how far apart the ranks arrive."""
    # Imported late: numpy and the libraries are not needed to say what is wrong with an option.
    from nccluprobe.canary.errors import CanaryError, LibraryError
    from nccluprobe.canary.launch import (
        DEFAULT_HOST,
        DEFAULT_PORT,
        Launch,
        from_environment,
        parse_address,
    )
    from nccluprobe.canary.libraries import simulated
    from nccluprobe.canary.plant import check_plan
    from nccluprobe.canary.run import run_rank
    from nccluprobe.canary.settings import Settings, dtypes_of, ops_of, redops_of, sizes_of
    from nccluprobe.canary.truth import check_file

    by_hand = rank is not None or world is not None
    planted = tuple(inject or ())
    for wrong, what in (
        (sim and (nccl or cuda), "--sim brings its own NCCL and driver: leave --nccl, --cuda out"),
        ((rank is None) != (world is None), "--rank and --world go together"),
        (nproc and (by_hand or address), "--nproc starts all ranks: no --rank, --world, --address"),
        (hold is not None and by_hand, "--hold is for --nproc"),
        (not serve and (every is not None or requests), "--every and --requests are for --serve"),
        (serve and (steps or pause), "--steps and --pause are not for --serve: give --requests"),
        (pause and not steps and not planted, "--pause is for --steps"),
    ):
        if wrong:
            raise NccluprobeError(what, ExitCode.USAGE)
    settings = Settings(
        ops=ops_of(ops),
        sizes=sizes_of(sizes or (DEFAULT_SIM_SIZES if sim else DEFAULT_SIZES)),
        dtypes=dtypes_of(dtypes),
        redops=redops_of(redops),
        iters=iters,
        steps=steps if steps is not None or not planted else DEFAULT_STEPS,
        pause=pause,
        deadline=deadline if deadline is not None or planted else DEFAULT_DEADLINE,
        # Local ranks start together, and their parent ends them all when one has failed.
        patience=None if nproc is not None else deadline,
        serve=serve,
        every=every,
        requests=requests,
        inject=planted,
        truth=truth,
        as_json=as_json,
        verbose=verbose,
        endless=bool(planted) and hold is None and deadline is None,
    )
    if truth is not None:
        check_file(truth)
    libraries = simulated() if sim else (_text(nccl), _text(cuda))
    launch: Launch | None = None
    try:
        if rank is not None and world is not None:
            where = parse_address(address) if address else (DEFAULT_HOST, DEFAULT_PORT)
            launch = Launch(rank, world, None, where, "options")
        elif nproc is None or "NCCLUPROBE_CANARY_PARENT" in os.environ:
            launch = from_environment()
            if launch is not None and address:
                launch = replace(launch, address=parse_address(address))
        if launch is None and nproc is None and sim:
            nproc = DEFAULT_SIM_RANKS
            say(f"canary: {counted(nproc, 'local rank')}; --nproc N for more")
        if launch is None and nproc is not None:
            check_plan(settings, nproc)
            return _local_ranks(nproc, hold, None if planted else settings.deadline, sim)
        if launch is None:
            raise NccluprobeError(
                "no launcher's variables are set: start it under torchrun, srun or mpirun, or "
                "give --nproc N, or --rank, --world and --address",
                ExitCode.USAGE,
            )
        return run_rank(launch, settings, *libraries)
    except CanaryError as error:
        if error.code is not ExitCode.INTERNAL:
            raise
        local = "NCCLUPROBE_CANARY_PARENT" in os.environ
        if launch is not None and launch.rank and local and isinstance(error, LibraryError):
            return ExitCode.CANARY_FAILED  # rank 0 of this machine says the same
        text = str(error)
        if launch is not None and launch.world > 1 and not text.startswith("rank "):
            text = f"rank {launch.rank}: {text}"
        raise NccluprobeError(text, ExitCode.CANARY_FAILED) from error


def _local_ranks(nproc: int, hold: float | None, grace: float | None, sim: bool) -> int:
    from nccluprobe.canary.ranks import Ranks
    from nccluprobe.canary.sweep import sweep

    try:
        # One second more, so that the ranks' own deadline comes first and says what it was.
        return Ranks(nproc, sys.argv[1:]).run(hold, None if grace is None else grace + 1)
    finally:
        if sim:
            sweep()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
