"""What runs workers: processes of this machine, ranks that a launcher started, tasks of Ray.

`process` is a process that does a share, `processes` start such and watch them, from a store by way of the `nursery`.
"""
