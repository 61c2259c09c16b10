"""Contenders of distributed.py and step.py: a module each, imported only where they run."""
