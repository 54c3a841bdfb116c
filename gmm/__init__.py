"""Grouped matrix multiplication."""
