"""Strongly connected components, and parts of them that hold themselves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from nccluprobe.match.process import Actor
from nccluprobe.match.waits import Wait


def proven_part(
    actors: Sequence[Actor], waits: Sequence[Wait], hard: Mapping[Actor, Sequence[Wait]]
) -> tuple[tuple[Actor, ...], tuple[Wait, ...]] | None:
    """Of a cycle, a smaller one of hosts inside of calls: none of these can go on, ever.

    ``hard``: actor -> calls that it is inside of.  Who is outside, or waits for the
    device, is then no cause.  None: there is no such part, or it is the whole.
    """
    here = {id(w): w for w in waits if not w.weak and w.cause is None and not w.device}
    of = {a: [w for w in hard.get(a, ()) if id(w) in here] for a in actors}
    nodes: dict[Hashable, int] = {a: i for i, a in enumerate(actors)}
    nodes |= {at: len(actors) + i for i, at in enumerate(here)}
    edges = [[nodes[id(w)] for w in of[a]] for a in actors]
    edges += [[nodes[e.actor] for e in w.absent if of.get(e.actor)] for w in here.values()]
    listed = list(here.values())
    for found in components(edges):
        mine = tuple(actors[n] for n in found if n < len(actors))
        if 1 < len(mine) < len(actors):
            return mine, tuple(listed[n - len(actors)] for n in found if n >= len(actors))
    return None


def lasting_part(
    actors: Iterable[Actor],
    waits: Iterable[Wait],
    waits_of: Callable[[Actor], Sequence[Wait]],
) -> set[Actor]:
    """Of a cycle, who would wait on for one another if all came who are outside of it."""
    here = set(actors)
    left = {id(w): w for w in waits if not w.weak and w.cause is None}
    while True:
        before = len(here) + len(left)
        left = {
            at: w
            for at, w in left.items()
            if any(e.actor in here for e in (*w.absent, *w.held))
            or any(id(x) in left for x in w.behind)
        }
        here = {a for a in here if (w := waits_of(a)) and all(id(x) in left for x in w)}
        if len(here) + len(left) == before:
            return here


def components(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Strongly connected components, each after those that it points at (Tarjan)."""
    index = [-1] * len(edges)
    low = [0] * len(edges)
    on_stack = [False] * len(edges)
    stack: list[int] = []
    found: list[list[int]] = []
    count = 0
    for root in range(len(edges)):
        if index[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            n, at = work.pop()
            if at == 0:
                index[n] = low[n] = count
                count += 1
                stack.append(n)
                on_stack[n] = True
            for i in range(at, len(edges[n])):
                to = edges[n][i]
                if index[to] < 0:
                    work.append((n, i + 1))
                    work.append((to, 0))
                    break
                if on_stack[to]:
                    low[n] = min(low[n], index[to])
            else:
                if low[n] == index[n]:
                    component = []
                    while True:
                        x = stack.pop()
                        on_stack[x] = False
                        component.append(x)
                        if x == n:
                            break
                    found.append(component)
                if work:
                    up = work[-1][0]
                    low[up] = min(low[up], low[n])
    return found
