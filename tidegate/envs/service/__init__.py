"""The environment service: environments in worker processes, where rewards, states and tools run."""
