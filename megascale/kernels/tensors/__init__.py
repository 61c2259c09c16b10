"""What the host knows of tensors: many are read in one walk, and checked before a kernel sees their addresses."""
