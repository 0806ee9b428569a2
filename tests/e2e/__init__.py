"""End to end: the commands a user runs, on real processes, against the stand-in."""
