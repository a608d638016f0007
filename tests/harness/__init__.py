"""What tests of several packages run on: ranks, kills at every step, small disks, marks, versions of megatron-core."""
