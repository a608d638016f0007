"""Moving bytes from training buffers to inference buffers.

    plan's bucket --TransportSet.run--> choose_transport per transfer
        src == dst rank ................ local           strided copy
        same host, buffer exported ..... shared_memory   destination pulls from the peer's mapped pages
        else ........................... collective      packed messages, gloo or NCCL
    bucket's fan_out, once it came over the network: local or shared_memory, out of relay buffers (relay_buffers.py)

Start-up, on every rank (the only exchanges of objects there are):
    handles = export_handles(rank, training.buffers())          # then all-gathered and joined by the caller
    relays = RelayBuffers(rank, plan.relays)                    # their handles() too, where the plan has any
    router = TransportSet.connect(rank, merged_source_layout.buffers, all_handles, group, relays=relays)
    router.check(plan, exported=all_handles)
Every switch:
    fence                                                       # all sources are final
    for bucket in plan.buckets: router.run(bucket, source, destination)
    fence                                                       # sources may be overwritten; or bucket by bucket
"""

from hybrid_engine.ports import PhaseClock
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.pull import InProcessTransport, LocalTransport
from hybrid_engine.transports.relay_buffers import RelayBuffers
from hybrid_engine.transports.router import PREFERENCES, RunReport, TransportSet, choose_transport, export_handles
from hybrid_engine.transports.shared_memory import SharedMemoryTransport

__all__ = [
    "PREFERENCES",
    "CollectiveTransport",
    "InProcessTransport",
    "LocalTransport",
    "PhaseClock",
    "RelayBuffers",
    "RunReport",
    "SharedMemoryTransport",
    "TransportSet",
    "choose_transport",
    "export_handles",
]
