"""Functions behind the detectors."""
