"""What tests of several packages run on: ranks, kills at every step, small disks, a model of CUDA's driver, marks,
versions of megatron-core."""
