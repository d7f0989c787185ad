"""The pool of inference engines: health, dispatch, and the protocol."""
