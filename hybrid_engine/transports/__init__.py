"""Moving bytes from training buffers to inference buffers.

    router.py            TransportSet: gives each transfer of a bucket to a transport, and runs them in order
      registry.py          the transports there are, and which of them carries a transfer
      wiring.py            what they are built from
    pull.py              local: strided copies within a rank; and what transports share that only read
    shared_memory.py     the destination reads its peer's mapped pages, on one host
    collective.py        packed messages over gloo or NCCL
      messages.py          which bytes go to whom, derived at both ends
    relay_buffers.py     what several ranks of a host need crosses the network once, and is read from here
    batched_copies.py    thousands of small copies in few calls
    copies.py, phase_clock.py   the strided copy and its errors; where the time goes

    transfer of a bucket --choose_transport-->
        src == dst rank ................ local           strided copy
        same host, buffer exported ..... shared_memory   destination pulls from the peer's mapped pages
        else ........................... collective      packed messages, gloo or NCCL
    bucket's fan_out, once it came over the network: local or shared_memory, out of relay buffers

Ranks negotiate nothing: all walk the buckets of the plan in one order, run or abandoned, and derive from it which
transport carries what, and in which messages.

Start-up, on every rank, by switch/rendezvous.py (which also exchanges the objects):

    1  export_handles(rank, training.buffers())            for peers of the host; gathered
    2  RelayBuffers(rank, plan.relays, device)             their handles() too
    3  TransportSet.connect(Wiring(rank, buffers, all_handles, group, ...))     builds what the registry has
    4  router.check(plan, exported=all_handles)            every transfer that cannot be carried, at once

Every switch, by switch/weight_container.py, after a fence (all sources are final):

    1  router.prepare()                                    + relay memory
    2  router.run(bucket, source, destination, next)       for each bucket:
         Transport.start                                     + staging; messages of this bucket and the next are posted
         Transport.run, each in the registry's order         bytes arrive in the destination, or in relay buffers
         Transport.tell, fan_out, Transport.tell             relays -> readers -> relays: the relay buffer may be reused
    3  router.trim()                                       - staging, relay memory

A rank that fails calls `router.abandon` for the buckets that are left: headers with its reason are sent instead.

To add a transport: registry.py says how. To change: what is cast before it is sent, `plan.wire_dtype`; whom a
timeout blames, collective.py.
"""
