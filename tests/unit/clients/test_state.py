"""What a module remembers is found, and put back exactly."""

import gc
import random
import weakref
from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassF1Score

from fedrec.clients.state import ModuleState, forget_states, state_of


def counting():
    """A function that counts its calls in a variable of another one."""
    calls = 0

    def hook(gradient):
        nonlocal calls
        calls += 1
        return gradient

    return hook, lambda: calls


class Everything(nn.Module):
    """One of each kind of thing that a module may remember."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.f1 = MulticlassF1Score(num_classes=2)
        self.register_buffer("mean", torch.tensor([1.0, float("nan")]), persistent=False)
        self.register_buffer("table", torch.tensor([2654435761, 7]))
        self.register_buffer("phase", torch.tensor([1 + 2j]))
        self.big = torch.zeros(1 << 17)
        self.count = 0
        self.outputs = []
        self.nested = {"a": [{"b": 1}]}
        self.recent = deque([1, 2], maxlen=2)
        self.names = {"x"}
        self.by_label = defaultdict(list)
        self.array = np.arange(3.0)
        self.rng = np.random.default_rng(0)
        self.old_rng = np.random.RandomState(0)
        self.py_rng = random.Random(0)
        self.torch_rng = torch.Generator()
        hook, self.num_calls = counting()
        self.layer.bias.register_hook(hook)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)


def step_optimizer(m):
    m.layer(torch.ones(1, 2)).sum().backward()
    m.optimizer.step()


CHANGES = [
    ("count", lambda m: setattr(m, "count", m.count + 1)),
    ("outputs", lambda m: m.outputs.append(3)),
    ("nested['a'][0]", lambda m: m.nested["a"][0].update(b=2)),
    ("recent", lambda m: m.recent.append(3)),
    ("names", lambda m: m.names.add("y")),
    ("by_label", lambda m: m.by_label[3].append(1)),
    ("array", lambda m: m.array.__setitem__(0, 5.0)),
    ("rng", lambda m: m.rng.normal()),
    ("old_rng", lambda m: m.old_rng.normal()),
    ("py_rng", lambda m: m.py_rng.random()),
    ("torch_rng", lambda m: torch.rand(1, generator=m.torch_rng)),
    ("optimizer.state", step_optimizer),
    ("optimizer.param_groups[0]", lambda m: m.optimizer.param_groups[0].update(lr=1.0)),
    ("layer.bias", lambda m: m.layer(torch.ones(1, 2)).sum().backward()),
    ("mean", lambda m: m.mean.add_(1)),
    ("table", lambda m: setattr(m, "table", m.table + 1)),
    ("phase", lambda m: m.phase.data.mul_(2)),
    ("big", lambda m: m.big.data.add_(1)),
    ("frozen.weight", lambda m: m.frozen.weight.data.mul_(0.5)),
    ("norm.running_mean", lambda m: m.norm(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))),
    ("f1.tp", lambda m: m.f1.update(torch.tensor([1, 1]), torch.tensor([1, 0]))),
    ("norm.training", lambda m: m.norm.eval()),
    ("layer.bias", lambda m: m.layer.bias.requires_grad_(False)),
    ("layer.weight", lambda m: m.layer.weight.register_hook(lambda g: g)),
    ("_forward_hooks", lambda m: m.register_forward_hook(lambda *a: None)),
    ("later", lambda m: setattr(m, "later", 1)),
    ("layer.extra", lambda m: m.layer.register_module("extra", nn.ReLU())),
]


def everything(module):
    """Return what can be compared of a module after a change was put back."""
    generators = (
        module.rng.bit_generator.state,
        str(module.old_rng.get_state(legacy=False)["state"]["key"].sum()),
        module.py_rng.getstate(),
        module.torch_rng.get_state().tolist(),
    )
    tensors = {n: t.tolist() for n, t in {**module.state_dict(), "big": module.big}.items()}
    plain = (
        module.count,
        module.num_calls(),
        module.outputs,
        module.nested,
        list(module.recent),
        module.names,
        dict(module.by_label),
        module.array.tolist(),
        dict(module.optimizer.state),
        module.optimizer.param_groups[0]["lr"],
        module.f1.tp.tolist() if module.f1.tp.numel() < 9 else None,
        module.norm.training,
        [p.requires_grad for p in module.parameters()],
        [len(p._backward_hooks or {}) for p in module.parameters()],
        len(module._forward_hooks),
        hasattr(module, "later"),
        len(list(module.modules())),
    )
    return repr((generators, {n: v for n, v in tensors.items() if "layer" not in n}, plain))


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_every_change_is_named_and_put_back(name, change):
    module = Everything()
    before, state = everything(module), ModuleState(module)
    assert not state.has_changed
    change(module)
    assert name in state.changes()
    assert state.has_changed
    state.restore()
    assert state.changes() == []
    assert everything(module) == before


def test_trainable_parameters_are_left_alone():
    module = nn.Linear(1, 1)
    state = ModuleState(module)
    with torch.no_grad():
        module.weight.fill_(7.0)
    assert not state.has_changed
    state.restore()
    assert float(module.weight.detach()) == 7.0


def test_a_value_computed_anew_is_no_change():
    module = nn.Module()
    module.rate = 0.1
    state = ModuleState(module)
    module.rate = float("0.1")
    assert not state.has_changed


def test_the_state_of_a_module_is_taken_anew_where_it_has_changed():
    module = nn.Module()
    module.count = 0
    first = state_of(module)
    assert state_of(module) is first
    module.count = 1
    second = state_of(module)
    module.count = 2
    second.restore()
    assert module.count == 1


def test_modules_whose_states_are_kept_can_be_let_go():
    module = nn.Linear(1, 1)
    state_of(module)
    held = weakref.ref(module)
    del module
    forget_states()
    gc.collect()
    assert held() is None


def test_tensors_of_inference_mode_are_left_alone():
    """Metrics of a module that `Trainer.test` has tested hold such."""
    module = nn.Module()
    with torch.inference_mode():
        module.total = torch.ones(2)
    total, state = module.total, ModuleState(module)
    assert not state.has_changed
    module.total = module.total + 1
    assert state.changes() == ["total"]
    state.restore()
    assert module.total is total


def test_objects_that_hold_each_other_are_walked_once():
    module = nn.Module()
    module.own = {"itself": module}
    module.own["dict"] = module.own
    state = ModuleState(module)
    module.own["new"] = 1
    assert state.changes() == ["own"]
    state.restore()
    assert set(module.own) == {"itself", "dict"}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_buffers_of_scripted_layers_are_put_back():
    norm = torch.jit.script(nn.Sequential(nn.BatchNorm1d(1, momentum=0.5)))
    state = ModuleState(nn.Sequential(norm))
    assert not state.has_changed
    norm(torch.tensor([[2.0], [4.0]]))
    assert float(norm.state_dict()["0.running_mean"]) == 1.5
    assert "0.0.running_mean" in state.changes()
    state.restore()
    assert float(norm.state_dict()["0.running_mean"]) == 0.0
    assert not state.has_changed
