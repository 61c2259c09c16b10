"""The Triton backend: an accelerator's kernels, and the tables that they read."""
