"""``python -m megascale report``: runs drawn as one page and one picture."""
