"""Contenders for benchmarks/distributed.py: one module each, imported only in the processes that run it."""
