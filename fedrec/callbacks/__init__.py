"""Hooks into a running loop."""

from fedrec.callbacks.callback import Callback
from fedrec.callbacks.progress import RichProgressBar

__all__ = ["Callback", "RichProgressBar"]
