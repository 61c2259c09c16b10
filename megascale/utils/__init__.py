"""What knows nothing of optimizers: collectives, files, DTensors, checks of arguments."""
