"""Where weights and training state lie, and what becomes of them at a switch.

    elastic.py           buffers whose pages come and go under one address, readable by peers on the host
    offloader.py         training state: device -> host memory and back
      inventory.py         what there is to offload, storage by storage
      arena.py             host memory, and the copies to and from it
      spans.py             sets of byte ranges
    weight_container.py  inference weights: empty -> filled bucket by bucket -> released

Import from the modules: `weight_container` needs the transports, which need `elastic`.
"""
