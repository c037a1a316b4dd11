"""Every codec by name."""

from __future__ import annotations

from fedrec.exceptions import ConfigurationError, expected
from fedrec.history.codecs.base import Codec
from fedrec.history.codecs.float16 import Float16Codec
from fedrec.history.codecs.float32 import Float32Codec
from fedrec.history.codecs.int8 import Int8Codec
from fedrec.history.codecs.int8_zstd import Int8ZstdCodec
from fedrec.history.codecs.lz4 import Lz4Codec
from fedrec.history.codecs.sign import SignCodec
from fedrec.history.codecs.zstd import ZstdCodec

__all__ = ["CODECS", "register_codec"]

_OURS: tuple[Codec, ...] = (
    Float32Codec(),
    Lz4Codec(),
    ZstdCodec(),
    Float16Codec(),
    Int8Codec(),
    Int8ZstdCodec(),
    SignCodec(),
)
CODECS: dict[str, Codec] = {codec.name: codec for codec in _OURS}


def register_codec(codec: Codec) -> None:
    """Make a codec known by its name, to write and to read histories with it.

    Every process that opens such a history has to do so first. Check a codec of your own with
    `fedrec.testing.codecs.CodecContract`.

    Args:
        codec: The codec. Its `id`, 128 to 255, and its `name` are stored in every history: choose
            them once.

    Raises:
        ConfigurationError: If it is not a codec, its id is not between 128 and 255, or another
            codec has its name or id.
    """
    if not isinstance(codec, Codec):
        raise ConfigurationError(expected("codec", "an instance of a Codec", codec))
    if not (isinstance(codec.name, str) and codec.name):
        raise ConfigurationError(expected("codec.name", "a name", codec.name))
    if not (isinstance(codec.id, int) and 128 <= codec.id <= 255):
        raise ConfigurationError(
            expected("codec.id", "between 128 and 255, the ids that are not fedrec's", codec.id)
        )
    for known in CODECS.values():
        if codec.name == known.name or codec.id == known.id:
            raise ConfigurationError(
                f"Codec `{codec.name}` ({type(codec).__name__}, id {codec.id}) cannot be "
                f"registered: `{known.name}` ({type(known).__name__}) has id {known.id}. "
                "HINT: choose another name and id, and register a codec once."
            )
    CODECS[codec.name] = codec
