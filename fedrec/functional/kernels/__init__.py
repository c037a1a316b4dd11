"""Compiled kernels, and what computes by blocks of columns."""
