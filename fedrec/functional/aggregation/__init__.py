"""Functions behind the aggregation rules."""
