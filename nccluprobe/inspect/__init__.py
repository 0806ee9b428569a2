"""Who stands where in a job that is already running, or already hung.

No probe and no wait: the communicators are found in the processes' memory,
which is read without stopping or changing them.
"""
