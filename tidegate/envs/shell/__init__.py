"""The environment `shell`: tasks on files of generated folders, in a sandbox."""
