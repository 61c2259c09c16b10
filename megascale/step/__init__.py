"""The parts of a step, shared by all optimizers and by ChainedOptimizer."""
