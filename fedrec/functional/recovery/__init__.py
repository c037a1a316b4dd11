"""Functions behind the recoverers."""
