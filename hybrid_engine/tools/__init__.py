"""Tools for jobs: the commands `plan`, `verify`, `certify` and `env`. No job imports this package.

plan/         memory and traffic of a job, computed from its configuration alone
verify/       comparison of a switch between real engines with a full load; facts of this machine
cli/          options and output of the commands; __main__.py starts them
launching.py  ranks as subprocesses, for callers without torchrun
"""
