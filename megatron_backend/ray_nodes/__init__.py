"""`srun python -m megatron_backend.ray_nodes JOB_DIR --attempt N`: Ray over the machines of a step.

One task a machine. Task 0 starts the head of a new Ray, the others a raylet each, and when all are
there task 0 runs the driver (`python -m megatron_backend` with the same arguments) with RAY_ADDRESS
set. When the driver ends, everything ends, with its exit code.

The tasks find each other through `attempts/N/ray.json`, which task 0 writes first of all: where it
listens, and a secret (mode 0600). The others keep a connection to it for as long as they live. It
carries Ray's address to them and their word that they are up back, and its end is the end of the
step, however task 0 went.

`ray symmetric-run` does much the same, and was not taken: it wants one fixed port for the head,
known to all before the start, and takes two tasks with the same host for one (two jobs can share a
machine, and the tests' machines are all one host); its Ray has no secret; and it does not outlive
the signals of SLURM, which are the next matter.

SLURM tells a job to end by a signal to every process of it. The driver then has its step to finish
and its state to save, and needs its ranks for that. So Ray's processes are started with those
signals blocked, which ranks inherit: they are ended by KILL, when the driver is done.
"""
