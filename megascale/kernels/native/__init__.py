"""The native backend: C over tables of addresses, on a CPU."""
