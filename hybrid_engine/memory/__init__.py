"""Where weights and training state lie, and what becomes of them at a switch.

    elastic.py           buffers whose pages come and go under one address, readable by peers on the host
    offloader.py         training state: device -> host memory and back
    weight_container.py  inference weights: empty -> filled bucket by bucket -> released

Import from the modules: `weight_container` needs the transports, which need `elastic`.
"""
