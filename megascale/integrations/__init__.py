"""Hooks of other libraries, one module each. Nothing here is imported by ``import megascale``."""
