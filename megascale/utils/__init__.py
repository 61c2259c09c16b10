"""Utilities that are independent of optimizers: collectives, files, DTensors, checks of arguments."""
