"""zstd and lz4: loaded when needed; how many bytes may come out is checked before."""

from __future__ import annotations

__all__ = ["lz4_compress", "lz4_decompress", "zstd_compress", "zstd_decompress"]

# Higher levels take longer and gain nothing on gradients.
_LEVEL = 1


def zstd_compress(data: bytes | memoryview) -> bytes:
    """Return one zstd frame."""
    import zstandard

    # A new compressor every time: two threads must not share one, and making one is cheap.
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def zstd_decompress(payload: memoryview, size: int) -> bytes:
    """Return the `size` bytes of a zstd frame.

    Raises:
        ValueError: If it is not one frame of so many bytes.
    """
    import zstandard

    try:
        # Memory is taken for as many bytes as a frame claims: compare that first.
        claimed = zstandard.frame_content_size(payload)
        if claimed != size:
            raise ValueError(f"a zstd frame of {claimed} bytes cannot hold {size}")
        data = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return _complete(data, size)


def lz4_compress(data: bytes | memoryview) -> bytes:
    """Return one lz4 block, without its size."""
    import lz4.block  # type: ignore[import-untyped]

    block: bytes = lz4.block.compress(data, store_size=False)
    return block


def lz4_decompress(payload: memoryview, size: int) -> bytes:
    """Return the `size` bytes of an lz4 block.

    Raises:
        ValueError: If it is not a block of so many bytes.
    """
    import lz4.block

    try:
        data = lz4.block.decompress(payload, uncompressed_size=size)
    except lz4.block.LZ4BlockError as error:
        raise ValueError(str(error)) from error
    return _complete(data, size)


def _complete(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes came out instead of {size}")
    return data
