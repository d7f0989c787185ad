"""The dashboard: a run's files as a page in the browser, during the run or afterwards.

The server reads and never writes. Files that grow are followed by their offset, files of trajectories are
indexed by line, and one record is read at a time, so that a large run opens as fast as a small one.
"""
