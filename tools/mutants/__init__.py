"""Mutants of the matcher: each lacks one rule; see tools/mutate_rules."""
