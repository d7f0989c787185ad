"""Views of a run: a live view or plain lines, a report at its end, and a dashboard.

The trainer never imports this package: it is handed a `tidegate.observer.Observer`.
"""
