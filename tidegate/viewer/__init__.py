"""What a person sees of a run: a live view or plain lines, and a report when it ends.

The trainer never imports this package: it is handed an object with the methods of `base.Observer`.
"""
