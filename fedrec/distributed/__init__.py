"""Several processes for one run: ranks, and the shards of clients that they compute and store."""
