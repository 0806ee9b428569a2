"""Other tools' data as the matcher's own items: dumps, reports and logs.

Each module reads one kind: PyTorch's flight recorder, NCCL RAS, NCCL Inspector
and NCCL's own log.  What they yield is what traces yield (``match/model.py``),
so the same rules judge it, and communicators of several sources are one where
the sources share NCCL's hash.
"""
