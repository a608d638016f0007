"""Memory of weights and training state: buffers whose pages come and go, and offloading. Knows nothing of layouts.

    elastic.py           buffers whose memory is released and restored under one address, readable by peers on the host
      host_pages.py        on the CPU: memory files; tensors over memory that torch did not allocate
      device_pages.py      on CUDA: the driver's virtual memory, and how another process reads it
      cuda_driver.py       the driver's calls, checked
      descriptors.py       how the owner's descriptors come to its peers
    offloader.py         training state: device -> host memory and back
      offload_items.py     what there is to offload, storage by storage
      arena.py             host memory: forks do not inherit it, a GPU can read it; copies

Called by the trainer (buffers, items to offload), by switch/ (offloads, onloads, releases) and by transports/ (peers'
buffers).
"""
