"""Reports of other projects' users as tests: each docstring names the thread as `owner/repo#number`."""
