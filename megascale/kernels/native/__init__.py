"""The native backend: C kernels over tables of addresses, on a CPU."""
