"""Clients of the tests: each notes what it is asked, and some misbehave."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedrec.data import Digits
from fedrec.flower import make_client_app
from fedrec.models import MLP


def make_module(context: Context | None = None) -> MLP:
    torch.manual_seed(0)
    return MLP(in_features=64)


def make_data(context: Context | None = None) -> Digits:
    return Digits(num_clients=6)


def misbehave(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Note the task; answer as the node's settings say."""
    how = context.node_config.get("how", "")
    values = message.content.config_records.get("task")
    if values is not None:
        line = f"{values['phase']} {values['round']} {context.node_config['client-id']}\n"
        with (Path(str(context.run_config["folder"])) / "asked.txt").open("a") as file:
            file.write(line)
    reply = call_next(message, context)
    if values is None or not how:
        return reply
    if how == "hang" and (values["phase"], values["round"]) == ("recover", 1):
        threading.Event().wait()  # until its node is stopped
    arrays, card = reply.content["arrays"], reply.content["card"]
    update = arrays["update"].numpy()
    if how == "late":
        time.sleep(float(context.run_config["timeout"]) + 5)
    elif how == "shape":
        arrays["update"] = Array(np.zeros(7, np.float32))
    elif how == "nan":
        arrays["update"] = Array(update * np.float32("nan"))
    elif how == "round":
        card["round"] = 99
    elif how == "other":
        card["client-id"] = "client-0"
    return reply


app = make_client_app(make_module, make_data, batch_size=32, app=ClientApp(mods=[misbehave]))
