"""Ranks of a job: how they start, agree, detect failures of each other, and end.

    job.py              Job: rank, hosts, device and agreement of this process; its rendezvous
    world.py            processes of a job, and the store through which they find each other
    agreement.py        all ranks leave a phase together: all succeeded, or all raise; pace of hosts
      failure_watch.py    detects failures of other ranks while this rank still waits for them
      rank_tree.py        tree of small groups for data that all ranks need
      groups.py           hosts and processes; gloo groups of some ranks; end of process groups
      background.py       calls in a thread while ranks keep meeting
      signals_and_forks.py  postponed signal handlers; resources that forked children keep
    communicators.py    release of the memory of idle NCCL communicators
    digests.py          8-byte digests of tensors of any size, computed where they are
    uncaught.py         one traceback for an error that ends several ranks; known warnings
    torch_internals.py  private names of torch used below the backends, with reasons; default modes

    1  Job.join(timeout)              by ActorHybridWorker, ScriptEngine, or other owners of engines
    2    join_process_group           waits until all ranks have started
    3    hosts of all ranks           exchanged once through the job's store
    4    Agreement(world, hosts, …)   separate connections, and a thread that watches
    5  with job.building(): ...       set-up, with longer timeouts; steps in `agreement.phase(name)`
    6  with agreement.phase(name): ... each phase of a switch
    7  job.close()                    after all its users

    a rank raises in a phase -> reports to the watch -> the others arrive, or are ended
                             -> RemoteError or LostRankError

Device memory: none but that of `digests`, which is 128 KiB, and up to 32 MiB during a call.

To change the text of an error after a wait, see agreement.py. The length of waits is
`timeout_seconds` of the configuration and the constants of agreement.py. failure_watch.py decides
when a rank counts as lost, what is logged then (logger "hybrid_engine.failures") and when a process
is ended. docs/failures.md lists every wait.
"""
