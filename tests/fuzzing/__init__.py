"""A seeded driver that sends generated bodies and histories to the gateway, and checks the responses.

`stories` makes the requests of a session, `values` makes invalid values, `dialects` valid requests; `drive`
runs many sessions against one gateway. `python -m tests.fuzzing --help` describes the command.
"""
