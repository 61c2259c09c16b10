"""Imported by the process that ranks are forked from: what takes seconds, once for all of them.

Python's garbage collector, and what else walks through all objects, leaves these out: they are there to stay.
"""

import atexit
import gc

import hypothesis  # noqa: F401  # as pytest: files of tests import both
import pytest  # noqa: F401
import torch._dynamo  # torch imports it for the first optimizer
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import megascale.checkpoint  # noqa: F401

gc.freeze()
atexit.register(gc.unfreeze)  # nanobind's libraries count at the end what was not collected
