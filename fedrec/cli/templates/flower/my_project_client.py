"""The client's side."""

from my_project import TRAINING, make_data, make_module

from fedrec.flower import make_client_app

app = make_client_app(make_module, make_data, **TRAINING)
