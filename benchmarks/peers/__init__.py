"""Contenders of distributed.py, step.py and sweep.py: a module each, imported only where they run."""
