"""An HTTP/1.1 client for calls so frequent that a general client's overhead counts."""
