"""What tests of several packages run on: ranks, kills at every step, other processes, small disks, CUDA's driver in
host memory, marks, versions of megatron-core."""
