"""Memory of weights and training state: buffers whose pages come and go, and offloading. Knows nothing of layouts.

    elastic.py           buffers whose memory is released and restored under one address, readable by peers on the host
      host_pages.py        on the CPU: memory files
      device_pages.py      on CUDA: the driver's virtual memory; device_peers.py reads it from another process
      cuda_driver.py       the driver's calls, checked
      borrowed.py          tensors over memory that torch did not allocate
    offloader.py         training state: device -> host memory and back
      offload_items.py     what there is to offload, storage by storage
      arena.py             host memory: it grows in place, forks do not inherit it, a GPU can read it
      copier.py            copies to and from it
      residual.py          what is still on the device after an offload
      spans.py             sets of byte ranges
    libc.py              the C library

Called by the trainer (buffers, items to offload), by switch/ (offloads, onloads, releases) and by transports/ (peers'
buffers).
"""
