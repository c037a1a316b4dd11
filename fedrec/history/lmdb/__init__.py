"""The history on disk, without torch: files, records, reading, writing, encryption."""
