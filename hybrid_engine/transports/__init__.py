"""Moving bytes from training buffers to inference buffers.

    router.py            the transports there are; TransportSet: gives each transfer of a bucket to one of them, and
                         runs them in order
      context.py           what they are built from; relay buffers: what several ranks of a host need crosses the
                           network once, and is read from there
    pull.py              local: strided copies within a rank; shared_memory: reads the peer's mapped pages, on one host
    collective.py        packed messages over gloo or NCCL
      messages.py          which bytes go to whom, derived at both ends
      deltas.py            what changed since the last message, in place of all of it
    copies.py            thousands of small copies in few calls, their errors and their time

    transfer of a bucket --choose_transport-->
        src == dst rank ................ local           strided copy
        same host, buffer exported ..... shared_memory   destination pulls from the peer's mapped pages
        else ........................... collective      packed messages, gloo or NCCL
    bucket's fan_out, once it came over the network: local or shared_memory, out of relay buffers

Ranks negotiate nothing: all walk the buckets of the plan in one order, run or abandoned, and derive from it which
transport carries what, and in which messages. Only what is sent of a message, all of it or a delta, its header says.

Start-up, on every rank, by switch/rendezvous.py (which also exchanges the objects):

    1  export_handles(rank, training.buffers())            for peers of the host; gathered
    2  RelayBuffers(rank, plan.relays, device)             exported too
    3  TransportSet.connect(TransportContext(rank, buffers, all_handles, group, ...))     builds what the registry has
    4  router.check(plan, exported=all_handles)            every transfer that cannot be carried, at once

Every switch, by switch/weight_container.py, after a fence (all sources are final):

    1  router.begin(whole)                                 whether messages may be deltas; on all ranks, and then
       router.prepare()                                    + relay memory
    2  router.run(bucket, source, destination, next)       for each bucket:
         Transport.start                                     + staging; messages of this bucket and the next are posted
         Transport.run, each in the registry's order         bytes arrive in the destination, or in relay buffers
         Transport.notify, fan_out, Transport.notify         relays -> readers -> relays: the relay buffer may be reused
    3  router.trim()                                       - staging, relay memory

A rank that fails calls `router.abandon` for the buckets that are left: headers with its reason are sent instead.

To add a transport: router.py says how. To change: what is cast before it is sent, `plan.wire_dtype`; whom a
timeout blames, collective.py.
"""
