# SPDX-License-Identifier: Apache-2.0
"""Choose the trainer rank that sends to each receiver, and join what the ranks that send return.

Rank 0 sends to all, as a rule. Where the transport stays in one memory (``ipc``), and every receiver shares a GPU (on
CPUs a host) with some rank, each gets the weights from that rank. Every rank can send, since every rank exports whole
tensors.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megarl.checkpoint_engine.choice import Memory, Receiver, Sender
from megarl.checkpoint_engine.mixin import Sent
from megarl.checkpoint_engine.participants import Sink, Source, gather
from megarl.checkpoint_engine.records import Receipt
from megarl.config import CheckpointEngineConfig
from megarl.errors import WeightSyncError

# Transports whose sender and receivers share memory.
IN_ONE_MEMORY = ("ipc",)


def senders_of(ranks: Sequence[Memory], receivers: Sequence[Receiver]) -> tuple[int, ...]:
    """Return the rank that sends to each receiver: the first with its memory. Empty if rank 0 sends to all.

    Args:
        ranks: the memory of each trainer rank.
        receivers: all vLLM workers.
    """
    first = {memory: rank for rank, memory in reversed(list(enumerate(ranks)))}
    found = [first.get(receiver.memory) for receiver in receivers]
    return tuple(rank for rank in found if rank is not None) if any(found) and None not in found else ()


def ask_senders(
    source: Source, sinks: Sequence[Sink], config: CheckpointEngineConfig, deadline: float
) -> tuple[int, ...]:
    """Return the rank that sends to each receiver of some sinks; empty if rank 0 sends to all.

    Raises:
        WeightSyncError: a participant does not say where it computes.
    """
    if config.transport not in IN_ONE_MEMORY:
        return ()
    [ranks] = gather({"trainer": source.places}, deadline, "prepare")
    if len(ranks) == 1:
        return ()
    # Whether a receiver reads the memory of another GPU does not matter here.
    receivers = ask_receivers(sinks, ranks[0]._replace(offer=b""), deadline, "prepare")
    return senders_of([rank.memory for rank in ranks], receivers)


def ask_receivers(sinks: Sequence[Sink], sender: Sender, deadline: float, phase: str) -> list[Receiver]:
    """Return where all workers of some sinks compute, and whether they read a sender's GPU.

    Raises:
        WeightSyncError: as ``gather``.
    """
    places = gather({sink.name: partial(sink.places, sender) for sink in sinks}, deadline, phase)
    return [place for part in places for place in part]


def joined_endpoint(endpoints: Sequence[bytes | None], senders: Sequence[int]) -> bytes:
    """Return rank 0's endpoint, with the others in ``"senders"``: by the receiver's index, as a string.

    Args:
        endpoints: what each rank's ``prepare_sync`` returned.
        senders: as for ``prepare_sync``.
    """
    if not senders:
        assert endpoints[0] is not None
        return endpoints[0]
    trees = [json.loads(endpoint) if endpoint else {} for endpoint in endpoints]
    return json.dumps(trees[0] | {"senders": {str(i): trees[rank] for i, rank in enumerate(senders)}}).encode()


def joined_sent(sent: Sequence[Sent | None]) -> Sent:
    """Return rank 0's report with the receipts that all ranks got, and the times of the slowest rank.

    Args:
        sent: what each rank's ``send_weights`` returned.

    Raises:
        WeightSyncError: a rank sent something else than rank 0; the message names it.
    """
    assert sent[0] is not None
    if not any(sent[1:]):
        return sent[0]
    first, seconds, receipts = Receipt.from_bytes(sent[0].manifest), dict[str, float](), list[bytes]()
    for rank, one in enumerate(sent):
        if one is None:
            continue
        manifest = Receipt.from_bytes(one.manifest)
        if manifest != first:
            raise WeightSyncError(
                f"trainer rank {rank} sent {manifest.count} tensors of {manifest.nbytes} bytes, checksum "
                f"{manifest.checksum}, but rank 0 sent {first.count} of {first.nbytes}, {first.checksum}: their "
                "weights have come to differ; resume from a checkpoint"
            )
        seconds = {name: max(took, seconds.get(name, 0.0)) for name, took in manifest.seconds.items()}
        receipts += one.receipts
    return Sent(replace(first, seconds=seconds).to_bytes(), receipts)
