"""Codecs: how updates become bytes in a history, and back, with NumPy alone."""

from fedrec.history.codecs.base import Codec, Encoded
from fedrec.history.codecs.float16 import Float16Codec
from fedrec.history.codecs.float32 import Float32Codec
from fedrec.history.codecs.int8 import Int8Codec
from fedrec.history.codecs.int8_zstd import Int8ZstdCodec
from fedrec.history.codecs.lz4 import Lz4Codec
from fedrec.history.codecs.registry import CODECS, register_codec
from fedrec.history.codecs.sign import SignCodec
from fedrec.history.codecs.zstd import ZstdCodec

__all__ = [
    "CODECS",
    "Codec",
    "Encoded",
    "Float16Codec",
    "Float32Codec",
    "Int8Codec",
    "Int8ZstdCodec",
    "Lz4Codec",
    "SignCodec",
    "ZstdCodec",
    "register_codec",
]
