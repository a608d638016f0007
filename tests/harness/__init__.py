"""Support for tests of several packages: launcher of ranks, kills, processes, small disks,
marks."""
