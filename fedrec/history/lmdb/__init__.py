"""The history on disk, without torch.

`history` is the store, over `reading` and `writing`; both go through `entries` and `records`, which
says what the words mean, to the LMDB `environment`.
"""
