"""Everything that can be known to be wrong with a job before a machine is taken."""
