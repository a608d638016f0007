"""Moving bytes from training buffers to inference buffers.

    plan's bucket --TransportSet.run--> choose_transport per transfer
        src == dst rank ................ local           strided copy
        same host, buffer exported ..... shared_memory   destination pulls from the peer's mapped pages
        else ........................... collective      packed messages, gloo or NCCL

Start-up, on every rank (the only exchange of objects there is):
    handles = export_handles(rank, training.buffers())          # then all-gathered and joined by the caller
    router = TransportSet.connect(rank, merged_source_layout.buffers, all_handles, group)
    router.check(plan, exported=all_handles)
Every switch:
    fence                                                       # all sources are final
    for bucket in plan.buckets: router.run(bucket, source, destination)
    fence                                                       # sources may be overwritten; or bucket by bucket
"""

from hybrid_engine.ports import PhaseClock
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.pull import InProcessTransport, LocalTransport
from hybrid_engine.transports.router import PREFERENCES, RunReport, TransportSet, choose_transport, export_handles
from hybrid_engine.transports.shared_memory import SharedMemoryTransport

__all__ = [
    "PREFERENCES",
    "CollectiveTransport",
    "InProcessTransport",
    "LocalTransport",
    "PhaseClock",
    "RunReport",
    "SharedMemoryTransport",
    "TransportSet",
    "choose_transport",
    "export_handles",
]
