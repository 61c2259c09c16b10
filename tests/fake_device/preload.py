"""Imported by the process that all others are forked from."""

from tests.fake_device.process import make_ready

make_ready()
