"""Attacks' formulas."""
