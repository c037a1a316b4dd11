"""The `fedrec` command."""
