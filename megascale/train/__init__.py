"""The training program: ``python -m megascale.train``, alone or under torchrun. See config.py for every option."""
