"""A seeded driver that sends generated bodies and histories to the gateway, and checks the responses.

`stories` tells sessions case by case, `values` makes what is wrong, `dialects` what is right; `drive` runs
many stories against one gateway. `python -m tests.fuzzing --help` runs it by itself.
"""
