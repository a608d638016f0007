"""What tests of several packages run on: ranks, kills at every step, small disks, versions of megatron-core."""
