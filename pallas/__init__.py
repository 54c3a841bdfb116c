"""Pallas TPU backends: adapters of public kernels, found through the registry by name."""
