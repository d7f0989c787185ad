"""For all tests."""

from hypothesis import settings

# On shared cores an example may wait for longer than it takes.
settings.register_profile("shared_cores", deadline=None)
settings.load_profile("shared_cores")
