"""Transport of bytes from training buffers to inference buffers.

    router.py            the registry of transports; TransportSet: assigns each transfer of a bucket
                         to one of them, and runs them in order
      context.py           base class and inputs of transports; relay buffers: data that several
                           ranks of a host need crosses the network once, and is read from there
    pull.py              local: strided copies within a rank; shared_memory: reads the peer's mapped
                         pages, on one host
    collective.py        packed messages over gloo or NCCL
      messages.py          the bytes of each message, derived at both ends
      deltas.py            codec of messages to servers: deltas of the previous ones
    copies.py            thousands of small copies in few calls, and their errors
      runs.py              equal boxes at equal distances, as views or in tables of tiles
      tile_kernel.py       the kernel that copies tiles on a GPU

    transfer of a bucket --choose_transport-->
        src == dst rank ................ local           strided copy
        same host, buffer exported ..... shared_memory   destination reads the peer's mapped pages
        else ........................... collective      packed messages, gloo or NCCL
    bucket's fan_out, after it crossed the network: local or shared_memory, out of relay buffers

Ranks negotiate nothing: all walk the buckets of the plan in one order, run or abandoned, and derive
the transport and the message of each transfer. Only a delta's length is in a message's header.

Start-up, on every rank, by switch/setup.py (which also exchanges the objects):

    1  RelayBuffers(rank, plan.relays, device)
    2  export_handles(rank, buffers)                    of those that peers read (`pulled_buffers`);
                                                        gathered among the ranks of the host
    3  TransportSet.connect(TransportContext(rank, buffers, all_handles, group, ...))
                                                        builds the transports of the registry
    4  router.check(plan, exported=all_handles)         reports all transfers that cannot be carried

Every switch, by switch/weight_container.py, after a fence (all sources are final):

    1  router.begin(whole)                              whether messages may be deltas; on all ranks
       router.prepare()                                 + relay memory
    2  router.run(bucket, source, destination, next)    for each bucket:
         Transport.prepare                                in the first switch only
         Transport.start                                  + staging; posts messages of this bucket
                                                          and the next
         Transport.run, each in the registry's order      bytes arrive in the destination, or in
                                                          relay buffers
         Transport.notify, fan_out, Transport.notify      relays -> readers -> relays: the relay
                                                          buffer may be reused
    3  router.trim()                                    - staging, relay memory

A rank that fails calls `router.abandon` for the remaining buckets, which sends headers with its
reason. To add a transport, see router.py. To change the dtype of messages, see `plan.wire_dtype`.
"""
