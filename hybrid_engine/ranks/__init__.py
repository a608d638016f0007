"""The ranks of a job: how they start, what they know of each other, and how they fail together.

    job.py              Job: rank, hosts, device, agreement; handed to all that ask who is who; how ranks meet
    world.py            the processes of a job, and the store by which they find each other
    agreement.py        all ranks leave a phase together: all succeeded, or all raise; hosts keep near each other in it
      failure_watch.py    what became of the others, known while this rank still waits for them
      rank_tree.py        what all must know goes from each host's ranks to its first, from these to the first of few
      groups.py           hosts, and whether a process still lives; groups of some ranks; the end of groups
      background.py       a call goes on in a thread while ranks meet
      process.py          a signal waits for the end of collectives; forked children end nothing of the rank's
    digests.py          8 bytes for a tensor of any size, computed where it lies
    uncaught.py         an error that ends several ranks is printed once
    launching.py        ranks as subprocesses, for those who have no torchrun (verification/, tests)
    torch_internals.py  private names of torch below the backends, with their reasons; what a rank computes is the same
                        inside autocast, inference mode and another default dtype

    1  Job.join(timeout)              by ActorHybridWorker, ScriptEngine, or whoever builds both engines
    2    join_process_group           waits until all ranks have started
    3    hosts of all                 by the job's store, once
    4    Agreement(world, hosts, …)   connections of its own, and a thread that watches
    5  with agreement.building(): ... set-up, with longer waits; each step in `agreement.phase(name)`
    6  with agreement.phase(name): ... each phase of a switch
    7  job.close()                    after all that uses it

    one rank raises within a phase -> tells the watch -> others arrive, or are ended -> RemoteError, or LostRankError

Memory: nothing on the device. To change: what a wait's end says, agreement.py; how long a wait is, `timeout_seconds` of
the configuration and the constants of agreement.py; when a rank counts as lost, what is logged then (logger
"hybrid_engine.failures") and when a process is ended, failure_watch.py. docs/failures.md lists every wait.
"""
