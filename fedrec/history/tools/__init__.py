"""What is done to a whole history: check, copy, repair, forget, export, import."""
