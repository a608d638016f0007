"""Memory of weights and training state: releasable buffers and offloading. Independent of layouts.

    elastic.py           buffers whose memory is released and restored at a constant address, and
                         which peers on the host can read
      host_pages.py        on the CPU: memory files; tensors over memory that torch did not allocate
      device_pages.py      on CUDA: the driver's virtual memory, and how another process reads it
      cuda_driver.py       checked calls of the driver
      descriptors.py       file descriptors of the owner, passed to its peers
    pool.py              memory of a GPU that training and inference use in turn
    offloader.py         training state: device -> host memory and back
      offload_items.py     the inventory to offload, storage by storage
      refusal.py           tensors that are off the device: every use of them asks first
      arena.py             host memory that a GPU can read and forks do not inherit; copies

Called by the trainer (buffers, items to offload), by switch/ (offloads, onloads, releases) and by
transports/ (peers' buffers).
"""
