"""A seeded driver that sends the gateway bodies and histories of every kind, and checks what comes back.

`stories` tells sessions case by case, `values` makes what is wrong, `dialects` what is right; `drive` runs
many stories against one gateway. `python -m tests.fuzzing --help` runs it by itself.
"""
