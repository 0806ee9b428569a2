"""nccluprobe: trace NCCL from outside and find who broke a collective."""

__version__ = "0.1.0"
