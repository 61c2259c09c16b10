"""Integrations with other libraries, one module each. ``import megascale`` imports none of them."""
