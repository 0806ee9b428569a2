"""Fuzzing for as long as a test may take; ``tools/fuzz`` goes on for longer."""

from __future__ import annotations

import os
import time

import pytest

from fuzz.case import Fuzzer

#: Cases that once broke something, by their seed.
KNOWN = [308, 450]
SECONDS = float(os.environ.get("NCCLUPROBE_FUZZ_SECONDS", "60"))
AT_LEAST = 200


@pytest.fixture(scope="module")
def fuzzer() -> Fuzzer:
    return Fuzzer()


@pytest.mark.parametrize("seed", KNOWN)
def test_what_broke_it_once(fuzzer: Fuzzer, seed: int) -> None:
    fuzzer.run(seed)


@pytest.mark.slow
def test_nothing_crashes_it(fuzzer: Fuzzer) -> None:
    """The same seeds first on every machine, so that a failure can be had again."""
    began, seed = time.monotonic(), 0
    while time.monotonic() - began < SECONDS or seed < AT_LEAST:
        try:
            fuzzer.run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: ./tools/fuzz --seed {seed}") from error
        seed += 1
    print(f"\n{seed} cases")
