"""Tool-call formats, one module each; `registry` lists them."""
