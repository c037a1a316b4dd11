"""Tools for a whole history: check, copy, repair, forget, export, import, info."""
