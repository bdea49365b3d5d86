# SPDX-License-Identifier: Apache-2.0
"""Export an adapter that one rank holds whole: as views of its parameters, whatever happens to these."""

import torch

from megarl.build import build_model
from megarl.lora.adapter import LoraAdapter
from megarl.model.trained_model import TrainedModel
from megarl.model.weights.sums import Deferred
from megarl.parallel.groups import destroy_groups
from tests.helpers.models import make_model


def test_views_of_the_parameters_are_what_the_export_gathers(tmp_path, monkeypatch):
    make_model(tmp_path, "qwen3", tied=True)
    section = {"path": str(tmp_path), "dtype": "float32"}
    model = build_model(section, lora={"r": 4, "target_modules": "all-linear"}, train={"device": "cpu"})
    try:
        for turn in range(3):
            for number, (_, parameter) in enumerate(model.adapter.parameters()):
                torch.nn.init.normal_(parameter.data, mean=turn + number)
            gathered = {name: tensor.clone() for name, tensor in model.adapter.export()}
            if turn == 1:
                # Moved parameters have other views.
                for _, parameter in model.adapter.parameters():
                    parameter.data = parameter.data.clone()
            exported = dict(model.export_weights(adapter_only=True))
            assert list(exported) == list(gathered)
            assert all(torch.equal(exported[name], tensor) for name, tensor in gathered.items())
        check_deferred(model)
        with monkeypatch.context() as patch:
            patch.setattr(LoraAdapter, "tensors", lambda self, values=None: [][0])
            assert len(list(model.export_weights(adapter_only=True))) == len(gathered), "nothing is gathered any more"
    finally:
        destroy_groups()


def check_deferred(model: TrainedModel) -> None:
    """A sync sends of base and merged weights what the exports stream, whole or in rows, and lists them once."""
    for kind, stream in (
        ("base", lambda: model.export_weights(adapter_only=False)),
        ("merged", lambda: model.export_merged(changed_only=True)),
    ):
        sent, exported = model.weights_to_send(kind), dict(stream())
        assert [name for name, _ in sent] == list(exported)
        assert model.weights_to_send(kind) is sent, "listed once"
        for _, parameter in model.adapter.parameters():
            torch.nn.init.normal_(parameter.data)
        exported = dict(stream())
        for name, tensor in sent:
            assert isinstance(tensor, Deferred) and tensor.dtype == exported[name].dtype
            torch.testing.assert_close(tensor.value(), exported[name], rtol=0, atol=0)
            torch.testing.assert_close(tensor[3:].value(), exported[name][3:], rtol=1e-6, atol=1e-6)
    assert any(tensor.update for _, tensor in model.weights_to_send("merged"))
