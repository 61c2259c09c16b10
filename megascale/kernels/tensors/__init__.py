"""Reads the addresses and types of many tensors in one walk, and checks them before a kernel uses them."""
