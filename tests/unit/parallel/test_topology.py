# SPDX-License-Identifier: Apache-2.0
"""Check that rank arithmetic agrees with mcore's order and inverts itself."""

import itertools

import pytest

from megarl.errors import ConfigError
from megarl.parallel.topology import Topology


@pytest.mark.parametrize("sizes", itertools.product((1, 2, 3), repeat=4))
def test_rank_and_coordinates_are_inverse(sizes):
    topology = Topology(*sizes)
    for rank in range(topology.world_size):
        tensor, context, data, pipeline = topology.coordinates(rank)
        assert topology.rank(tensor=tensor, context=context, data=data, pipeline=pipeline) == rank


def test_order_is_mcores():
    from megatron.core.parallel_state import RankGenerator

    topology = Topology(tensor=2, context=1, data=3, pipeline=2)
    generator = RankGenerator(tp=2, ep=1, dp=3, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    for axis, name in (("tp", "tensor"), ("dp", "data"), ("pp", "pipeline")):
        groups = generator.get_ranks(axis)
        place = ["tensor", "context", "data", "pipeline"].index(name)
        for group in groups:
            assert [topology.coordinates(rank)[place] for rank in group] == list(range(len(group)))


def test_rank_outside_is_refused():
    with pytest.raises(ConfigError, match="rank 4 is outside a layout of 4"):
        Topology(tensor=4).coordinates(4)
