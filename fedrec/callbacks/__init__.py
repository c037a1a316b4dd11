"""Hooks into a running loop."""

from fedrec.callbacks.callback import Callback, LoopSettings
from fedrec.callbacks.progress import RichProgressBar

__all__ = ["Callback", "LoopSettings", "RichProgressBar"]
