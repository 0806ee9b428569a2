"""What is true of a program, and whether findings say exactly that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from conformance.program import Program
from conformance.traces import comm_hash
from nccluprobe.match.finding import HANG_TYPES, RESERVED_HANG_TYPES, Finding

MISSING = "collective_missing_enter"
MISMATCH = "collective_mismatch"
SHIFT = "skipped_or_extra_call"
ENDED = "comm_ended_under_waiters"
STUCK = "collective_all_ranks_stuck"
CROSSED = "cross_comm_order_inversion"
P2P_MISMATCH, P2P_UNMATCHED, P2P_INVERTED = "p2p_mismatch", "p2p_unmatched", "p2p_order_inversion"

NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Truth:
    """What must be said.

    ``blamed``: the ranks that broke it; empty: nobody can be told from the
    others.  ``or_blamed``: answers that are as good, for the reason in ``why``.
    ``kinds``: names of the finding that are right.  ``causes``: how many
    findings of role root_cause one fault may make.
    """

    blamed: frozenset[int]
    kinds: tuple[str, ...]
    comm: str | None = None
    seq: int | None = None
    differs: str | None = None
    reasons: tuple[str, ...] = ()
    entered: frozenset[int] | None = None
    severity: str = "error"
    causes: int = 1
    or_blamed: tuple[frozenset[int], ...] = ()
    #: False: the traces are those of a healthy job too, so silence is right.
    required: bool = True
    #: False: whom to blame cannot be decided from any trace; the finding must be there.
    decidable: bool = True
    why: str = ""

    def __post_init__(self) -> None:
        assert set(self.kinds) <= {*HANG_TYPES, *RESERVED_HANG_TYPES}


#: A correct program: nothing at all is said.
SILENCE = Truth(NOBODY, (), why="correct")


@dataclass(frozen=True)
class Case:
    """One program.  ``fault``: its kind; "" for a correct twin."""

    op: str
    fault: str
    variant: str
    n: int
    build: Callable[[], Program] = field(compare=False)
    truth: Truth = field(compare=False)
    passes: bool = False

    @property
    def id(self) -> str:
        parts = (self.op, self.fault or "twin", self.variant, f"n{self.n}")
        return "-".join(p.replace(" ", "_") for p in parts if p)


def blamed(findings: Collection[Finding]) -> set[int]:
    """Ranks that are named as a cause."""
    return {
        who["rank"]
        for f in findings
        if f.state == "open" and f.role == "root_cause"
        for who in f.named
    }


def text(f: Finding) -> str:
    """A finding in one line, for people."""
    d = f.details
    keys = ("api", "reason", "differs_in", "entered_comm_ranks", "missing_comm_ranks", "summary")
    more = {k: d[k] for k in keys if d.get(k)}
    ranks = sorted(who["rank"] for who in f.named)
    return (
        f"{f.id} {f.hang_type} {f.severity} {f.role} of={f.downstream_of} names={ranks}"
        f" comm={(f.comm_uid_hash or '')[-2:]} seq={f.comm_seq} {more}"
    )


def faults_of(
    truth: Truth, findings: Collection[Finding], hashes: Mapping[str, str] | None = None
) -> list[str]:
    """What is wrong with these findings; nothing when they say what is true.

    ``hashes``: communicator's name -> its hash, where it is not that of a made-up trace.
    """
    standing = [f for f in findings if f.state == "open"]
    if truth is SILENCE:
        return [f"a correct program, and {text(f)}" for f in standing]
    found: list[str] = []
    named = frozenset(blamed(standing))
    allowed = (truth.blamed, *truth.or_blamed)
    if truth.decidable and named not in allowed:
        found.append(
            f"blamed {sorted(named)}, right is {' or '.join(map(str, map(sorted, allowed)))}"
        )
    if not standing and not truth.required:
        return found
    place = None if truth.comm is None else (hashes or {}).get(truth.comm, comm_hash(truth.comm))
    found += _main(truth, standing, place)
    causes = [f for f in standing if f.role == "root_cause"]
    if len(causes) > truth.causes:
        found.append(f"{len(causes)} causes for one fault")
    ids = {f.id for f in standing}
    for f in standing:
        if f.role == "downstream" and f.downstream_of not in ids:
            found.append(f"{f.id} is downstream of {f.downstream_of}, which is not there")
        if truth.blamed and causes and f.severity == "error" and f.role == "unknown":
            found.append(f"{f.id} is an error of role unknown beside the cause")
    return found


def _main(truth: Truth, standing: list[Finding], place: str | None) -> list[str]:
    """The finding that tells the fault: its name, place and content."""
    roles = {"root_cause"} if truth.blamed and not truth.or_blamed else {"root_cause", "unknown"}
    main = [f for f in standing if f.hang_type in truth.kinds and f.role in roles]
    if not main:
        return [f"no {' or '.join(truth.kinds)} that is a cause"] if truth.required else []
    wanted: dict[str, Callable[[Finding], bool]] = {
        "communicator": lambda f: place in (None, f.comm_uid_hash),
        "comm_seq": lambda f: truth.seq is None or f.comm_seq == truth.seq,
        "differs_in": lambda f: (
            truth.differs is None or f.details.get("differs_in") == [truth.differs]
        ),
        "reason": lambda f: not truth.reasons or f.details.get("reason") in truth.reasons,
        "entered": lambda f: (
            truth.entered is None or set(f.details["entered_comm_ranks"]) == truth.entered
        ),
        "severity": lambda f: truth.severity == "any" or f.severity == truth.severity,
    }
    if any(all(right(f) for right in wanted.values()) for f in main):
        return []
    wrong = [name for name, right in wanted.items() if not any(right(f) for f in main)]
    return [f"wrong {', '.join(wrong or ['together'])} of {main[0].hang_type}"]
