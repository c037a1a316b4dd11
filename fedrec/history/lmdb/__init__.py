"""The history on disk, without torch. What the words mean is said in `records`.

`history` is the store, over `reading` and `writing`; both go through `entries` and `records` to the
LMDB `environment`.
"""
