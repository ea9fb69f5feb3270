"""Run a command on untrusted code: a separate process with limits of time, memory and writable folders.

In: the words of a command, the folders that it may write to, limits. Out: an `Ending`. A keeper process
(`confinement.keeper`) is between the caller and the command: it ends every process that the command leaves behind. On
Linux the kernel refuses writes elsewhere (`confinement.landlock`). It protects against code that misbehaves, and is not
a virtual machine: the code can read its user's files and use the network.
"""
